"""``jaxspec plan``: whether speculation will pay for a model on a machine, before anything is loaded."""

import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxspec.cli import plan_devices, plan_train
from jaxspec.cli.plan_devices import shape_words
from jaxspec.cli.plan_question import PlanArgs, question_of
from jaxspec.cli.screen import Screen, amount
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.perf.planner import BatchPlan, Question

COLUMNS = ("rows", "plain", "best", "tau", "speed-up", "range", "pays", "break-even", "tok/s", "ms/tok")


def run(args: PlanArgs) -> int:
    """Plans, and prints a table or JSON."""
    if args.train is not None:
        return plan_train.run(args)
    if args.set:
        raise ConfigError("plan: --set changes the config of --train, which is not given")
    if args.price_per_hour is not None and not args.price_per_hour > 0:
        raise ConfigError(f"plan: --price-per-hour must be positive, got {args.price_per_hour}")
    if not args.batch or not args.lengths or not all(1 <= k <= 16 for k in args.lengths):
        raise ConfigError(f"plan: needs batches, and lengths from 1 to 16; got {args.batch} and {args.lengths}")
    if args.devices:
        return plan_devices.run(args)
    from jaxspec.perf.claims import claims
    from jaxspec.perf.planner import plan

    question, machine = question_of(args)
    if args.rules:
        entries: Any = [asdict(claim) for claim in claims(question)]
        plans = ()
    else:
        plans = plan(question, args.batch)
        entries = [_record(p, args.price_per_hour) for p in plans]
    about = _about(question, machine)
    if args.plot is not None:
        from jaxspec.inspect.plan_plot import plot_plan

        plot_plan(question, plans or plan(question, args.batch), args.plot, title=f"{question.model.name} on {machine}")
    if args.json:
        body = {"rules": entries} if args.rules else {"batches": entries}
        sys.stdout.write(json.dumps({**about, **body}, indent=2) + "\n")
        return 0

    screen = Screen(color=args.color)
    screen.line(f"{question.model.name} on {machine}", "bold")
    if args.rules:
        show_rules(entries, screen)
    else:
        show(question, plans, about, args.price_per_hour, screen)
    return 0


def _about(question: "Question", machine: str) -> dict[str, Any]:
    """Returns what a plan rests on."""
    from jaxspec.perf.drafting import ASSUMED
    from jaxspec.perf.planner import fitting_rows

    model = question.model
    assumed = {d.kind: ASSUMED[d.kind][3] for d in question.drafters if d.kind not in question.acceptance}
    return {
        "model": model.name,
        "machine": machine,
        "mesh": asdict(question.mesh),
        "context": question.context,
        "rows_that_fit": fitting_rows(question),
        "weights_per_token_gb": model.weight_bytes(1, 1) / 1e9,
        "assumed_acceptance": assumed,
    }


def _record(p: "BatchPlan", price_per_hour: float | None) -> dict[str, Any]:
    """Returns a batch ready for JSON."""
    from jaxspec.perf.planner import price_per_million

    record = asdict(p) | {"best": {**asdict(p.best), "pays": p.best.verdict}, "fits": p.memory.fits}
    record["memory"]["total_bytes"] = p.memory.total_bytes
    if math.isinf(p.memory.room_bytes):
        record["memory"]["room_bytes"] = None
    if price_per_hour is not None:
        rates = {"plain": p.plain_tok_per_s, "best": p.best.tok_per_s}
        record["price_per_million"] = {name: price_per_million(price_per_hour, rate) for name, rate in rates.items()}
    return record


def show(
    question: "Question", plans: tuple["BatchPlan", ...], about: dict[str, Any], price: float | None, screen: Screen
) -> None:
    """Prints a plan for people."""
    from rich.table import Table

    from jaxspec.perf.planner import price_per_million

    via = any(p.transports for p in plans)
    columns = (*COLUMNS, *(("via",) if via else ()), *(("price",) if price else ()))
    table = Table(*columns, title_justify="left", box=None, pad_edge=False)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for p in plans:
        o = p.best
        level = "never" if p.break_even is None else f"{p.break_even[0]:.2f} K={p.break_even[1]}"
        cells = (
            f"{'' if p.memory.fits else '! '}{p.rows}", f"{p.plain_tok_per_s:.0f}",
            f"{o.kind} {shape_words(o.branching)}", f"{o.acceptance_length:.2f}", f"{o.speedup:.2f}x",
            f"{o.low:.2f}-{o.high:.2f}", o.verdict, level, f"{o.tok_per_s:.0f}", f"{o.token_s * 1e3:.2f}",
        )  # fmt: skip
        cells += (min(p.transports, key=lambda name: p.transports[name]),) if via else ()
        table.add_row(*cells, *([f"{price_per_million(price, o.tok_per_s):.3g}"] if price else []))
    screen.console.print(table)
    screen.line(
        "plain, tok/s: tokens per second of all rows; tau: tokens per pass, the bonus included; break-even: least "
        "acceptance per draft that pays" + ("; price: per million tokens" if price else ""),
        "dim",
    )
    if via:
        screen.line(
            "via: the cheapest way of a plain step's rows to the experts; the times take ragged, --json has "
            "the seconds of each",
            "dim",
        )
    _show_memory(plans[0], screen)
    rows = about["rows_that_fit"]
    if rows is not None:
        words = (
            "not even the weights fit"
            if rows == 0
            else f"up to {rows} rows of {question.context} tokens, decoded plainly, fit"
        )
        screen.line(f"{words} into {amount(question.room_bytes)} per device; ! marks batches that do not")
    for kind, source in about["assumed_acceptance"].items():
        screen.line(f"acceptance of {kind} is assumed: {source}", "dim")
    screen.line(
        "error bars span assumed bandwidth, overheads, expert overlap and acceptance; calibrate to narrow them", "dim"
    )


def _show_memory(p: "BatchPlan", screen: Screen) -> None:

    parts = ", ".join(f"{part} {amount(size)}" for part, size in p.memory.by_part.items() if size)
    screen.line(f"memory of a device at batch {p.rows}: {parts}")


def show_rules(rules: list[dict[str, str]], screen: Screen) -> None:
    """Prints rules of thumb with what the model says."""
    styles = {"holds": "green", "does not hold": "red", "depends": "yellow"}
    for claim in rules:
        screen.line()
        screen.line(claim["rule"], "bold")
        screen.piece(f"  {claim['verdict']}: ", styles[claim["verdict"]])
        screen.line(claim["finding"])
