"""``jaxspec plan``: whether speculation will pay for a model on a machine, before anything is loaded."""

import json
import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.cli.screen import Screen
    from jaxspec.perf.cost import Mesh, ModelCost
    from jaxspec.perf.drafting import AcceptanceModel, DraftCost
    from jaxspec.perf.hardware import Hardware
    from jaxspec.perf.planner import BatchPlan, Question

PADDING_ROWS = 1024  # by which vocabularies of one tokenizer may differ
AXIS = re.compile(r"(data|expert|tensor)=(\d+)")
COLUMNS = ("rows", "plain", "best", "tau", "speed-up", "range", "pays", "break-even", "tok/s", "ms/tok")


@dataclass(frozen=True)
class PlanArgs:
    """What ``jaxspec plan`` is asked for.

    Attributes:
      model: A config.json, a model directory, demo, or a shipped config such as qwen3-30b-a3b. No weights are read.
      hardware: Device and how many, for example h200x8; or a record like those in configs/hardware. Not needed with
        --calibration.
      devices: Tabulate these numbers of devices of --hardware instead, each with --batch rows per device (8).
      mesh: Devices per axis, for example expert=4,tensor=2; by default experts (or a dense model's matrices) are
        spread over all devices.
      drafter: ngram, mtp, eagle, medusa, or the config of a draft model; by default the best of those that the model
        allows.
      acceptance: Probability that a draft is accepted after accepted ones (0.7), or the share of passes in which each
        position is accepted, as engines report it (0.9,0.72,0.48); by default published figures of the drafter.
      overlap: Experts that four neighbouring positions touch, as a share of the count under independent routing; by
        default the published range of 0.69 to 1.
      context: Tokens in the cache of each row.
      batch: Rows decoded together; by default 1 to 256.
      lengths: Drafts per step to choose from.
      trees: Choose among small trees, too, where the model can verify them.
      price_per_hour: Of all devices together, in any currency.
      calibration: What jaxspec calibrate wrote for this model; its machine is then planned for.
      dtype: Of weights that are not quantized.
      quantization: How weights lie in memory, as for generate.
      rules: Hold the usual rules of thumb against this model and machine.
      json: Print JSON.
      plot: File for a picture, .png, .svg or .pdf: speed-up by batch, target efficiency, experts touched.
      color: Color on a terminal.
    """

    GROUPS: ClassVar = {
        "machine": ("hardware", "devices", "mesh", "price_per_hour", "calibration", "dtype", "quantization"),
        "speculation": ("drafter", "acceptance", "overlap", "lengths", "trees"),
        "output": ("rules", "json", "plot", "color"),
    }

    model: str
    hardware: str | None = None
    devices: tuple[int, ...] = ()
    mesh: str | None = None
    drafter: str | None = None
    acceptance: str | None = None
    overlap: float | None = None
    context: int = 1024
    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    lengths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    trees: bool = True
    price_per_hour: float | None = None
    calibration: Path | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    rules: bool = False
    json: bool = False
    plot: Path | None = None
    color: bool = True


def run(args: PlanArgs) -> int:
    """Plans, and prints a table or JSON."""
    if args.price_per_hour is not None and not args.price_per_hour > 0:
        raise ConfigError(f"plan: --price-per-hour must be positive, got {args.price_per_hour}")
    if not args.batch or not args.lengths or not all(1 <= k <= 16 for k in args.lengths):
        raise ConfigError(f"plan: needs batches, and lengths from 1 to 16; got {args.batch} and {args.lengths}")
    if args.devices:
        from jaxspec.cli import plan_devices

        return plan_devices.run(args)
    from jaxspec.perf.claims import claims
    from jaxspec.perf.planner import plan

    question, machine = question_of(args)
    if args.rules:
        found: Any = [asdict(claim) for claim in claims(question)]
        plans = ()
    else:
        plans = plan(question, args.batch)
        found = [_record(p, args.price_per_hour) for p in plans]
    about = _about(question, machine)
    if args.plot is not None:
        from jaxspec.inspect.plan_plot import plot_plan

        plot_plan(question, plans or plan(question, args.batch), args.plot, title=f"{question.model.name} on {machine}")
    if args.json:
        body = {"rules": found} if args.rules else {"batches": found}
        sys.stdout.write(json.dumps({**about, **body}, indent=2) + "\n")
        return 0
    from jaxspec.cli.screen import Screen

    screen = Screen(args.color)
    screen.line(f"{question.model.name} on {machine}", "bold")
    if args.rules:
        show_rules(found, screen)
    else:
        show(question, plans, about, args.price_per_hour, screen)
    return 0


def question_of(args: PlanArgs) -> tuple["Question", str]:
    """What is to be planned, and the machine in words.

    Raises:
      ConfigError: model, hardware, mesh, drafter, acceptance or calibration are not usable.
    """
    from jaxspec.inspect.model_cost import model_cost
    from jaxspec.inspect.shipped import model_config
    from jaxspec.perf.calibration import Predictor, load_calibration
    from jaxspec.perf.machine import assumed_machines, calibrated_machines, default_mesh
    from jaxspec.perf.overlap import AssumedOverlap
    from jaxspec.perf.planner import TREES, Question

    name, config = model_config(args.model)
    model = model_cost(config, name=name, dtype=args.dtype, quantization=args.quantization)
    if (args.hardware is None) == (args.calibration is None):
        raise ConfigError("plan: give either --hardware, for example h200x8, or --calibration")
    drafters = drafters_of(args.drafter, model)
    if args.rules and args.drafter is None:
        # Rules are held against one drafter: what comes with the model, or what people train for it.
        drafters = tuple(d for d in drafters if d.kind == ("mtp" if model.prediction else "eagle"))
    room, mesh, rates = math.inf, parse_mesh(args.mesh), None
    if args.calibration is not None:
        calibration = load_calibration(args.calibration)
        _check_same(calibration.model, config, args.calibration)
        if args.overlap is not None or (mesh is not None and mesh.devices > 1):
            raise ConfigError(
                "plan: a calibration is of one device and has measured overlap; leave --mesh, --overlap out"
            )
        machines = calibrated_machines(Predictor(calibration, model))
        machine = (
            f"{calibration.machine.get('cpu')}, {calibration.machine.get('device')} (calibrated {calibration.date})"
        )
    else:
        hardware, count = machine_of(args.hardware or "")
        mesh = mesh or default_mesh(model, count)
        mesh.check(model)
        if mesh.devices != count:
            raise ConfigError(f"plan: --mesh has {mesh.devices} devices, --hardware {args.hardware} has {count}")
        room = hardware.memory_bytes * hardware.assumed.usable_memory
        overlap = None if args.overlap is None else AssumedOverlap(args.overlap)
        machines, rates = assumed_machines(model, hardware, mesh, overlap), hardware.rates()
        axes = ", ".join(f"{axis}={n}" for axis, n in asdict(mesh).items() if n > 1)
        machine = f"{count} x {hardware.name}" + (f", mesh {axes}" if axes else "")
    given = acceptance_of(args.acceptance)
    question = Question(
        model=model,
        machines=machines,
        drafters=drafters,
        mesh=mesh or _one(),
        room_bytes=room,
        acceptance={d.kind: (given,) for d in drafters} if given else {},
        context=args.context,
        lengths=args.lengths,
        trees=TREES if args.trees else (),
        rates=rates,
    )
    return question, machine


def machine_of(wanted: str) -> tuple["Hardware", int]:
    """A device's record and how many of them.

    Raises:
      ConfigError: there is no such record, or its servers have no network that the record knows.
    """
    from jaxspec.config import shipped
    from jaxspec.perf.hardware import load_hardware

    hardware, count = load_hardware(wanted, shipped("hardware"))
    if count > hardware.node_devices and not hardware.network_gb_per_s:
        raise ConfigError(
            f"plan: {count} x {hardware.name} are {-(-count // hardware.node_devices)} servers, and what joins them is "
            "not known; plan with a copy of its record in configs/hardware that says network_gb_per_s"
        )
    return hardware, count


def _one() -> "Mesh":
    from jaxspec.perf.cost import Mesh

    return Mesh()


def _check_same(calibrated: dict[str, str], config: dict[str, Any], file: Path) -> None:
    from jaxspec.checkpoint.files.fingerprint import digests

    if calibrated.get("config_digest") != digests(config)["config_digest"]:
        raise ConfigError(
            f"plan: {file} was measured with another model ({calibrated.get('name')}); calibrate this one"
        )


def parse_mesh(text: str | None) -> "Mesh | None":
    """Devices per axis, from ``expert=4,tensor=2``.

    Raises:
      ConfigError: the text says something else.
    """
    from jaxspec.perf.cost import Mesh

    if text is None:
        return None
    found = [AXIS.fullmatch(part.strip()) for part in text.split(",")]
    axes = {match[1]: int(match[2]) for match in found if match}
    if len(axes) != len(found):
        raise ConfigError(f"plan: --mesh is like expert=4,tensor=2 with axes data, expert and tensor; got {text!r}")
    return Mesh(**axes)


def drafters_of(wanted: str | None, model: "ModelCost") -> tuple["DraftCost", ...]:
    """The drafter that was asked for, or all that are possible without a draft model.

    Raises:
      ConfigError: it is not known, or the model has none of its kind.
    """
    from jaxspec.inspect.model_cost import model_cost
    from jaxspec.inspect.shipped import model_config
    from jaxspec.perf.drafting import KINDS, DraftCost
    from jaxspec.perf.planner import possible_drafters

    possible = possible_drafters(model)
    if wanted is None:
        return possible
    for drafter in possible:
        if drafter.kind == wanted:
            return (drafter,)
    if wanted == "mtp":
        raise ConfigError(f"plan: {model.name} has no layers of multi-token prediction; choose another drafter")
    if wanted in KINDS:
        raise ConfigError(f"plan: for {wanted} give the config of a draft model instead, for example llama-3.2-1b")
    name, config = model_config(wanted)
    draft = model_cost(config, name=name)
    if abs(draft.vocab_size - model.vocab_size) > PADDING_ROWS:
        raise ConfigError(
            f"plan: {name} has a vocabulary of {draft.vocab_size}, {model.name} of {model.vocab_size}; a draft model "
            "needs the target's tokenizer"
        )
    return (DraftCost("draft_model", draft),)


def acceptance_of(text: str | None) -> "AcceptanceModel | None":
    """One probability for every draft, or survival per position.

    Raises:
      ConfigError: the text says something else.
    """
    from jaxspec.perf.drafting import AcceptanceModel, acceptance_of_positions

    if text is None:
        return None
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"plan: --acceptance is like 0.7 or 0.9,0.72,0.48; got {text!r}") from None
    return AcceptanceModel((values[0],)) if len(values) == 1 else acceptance_of_positions(values)


def _about(question: "Question", machine: str) -> dict[str, Any]:
    """What a plan rests on."""
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
    """A batch ready for JSON."""
    from jaxspec.perf.planner import price_per_million

    found = asdict(p) | {"best": {**asdict(p.best), "pays": p.best.verdict}, "fits": p.memory.fits}
    found["memory"]["total_bytes"] = p.memory.total_bytes
    if math.isinf(p.memory.room_bytes):
        found["memory"]["room_bytes"] = None
    if price_per_hour is not None:
        rates = {"plain": p.plain_tok_per_s, "best": p.best.tok_per_s}
        found["price_per_million"] = {name: price_per_million(price_per_hour, rate) for name, rate in rates.items()}
    return found


def show(
    question: "Question", plans: tuple["BatchPlan", ...], about: dict[str, Any], price: float | None, screen: "Screen"
) -> None:
    """Prints a plan for people."""
    from rich.table import Table

    from jaxspec.cli.inspect import amount
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


def shape_words(branching: tuple[int, ...]) -> str:
    """``K=3`` for a chain, ``2x2x1`` for a tree."""
    return f"K={len(branching)}" if set(branching) == {1} else "x".join(map(str, branching))


def _show_memory(p: "BatchPlan", screen: "Screen") -> None:
    from jaxspec.cli.inspect import amount

    parts = ", ".join(f"{part} {amount(size)}" for part, size in p.memory.by_part.items() if size)
    screen.line(f"memory of a device at batch {p.rows}: {parts}")


def show_rules(found: list[dict[str, str]], screen: "Screen") -> None:
    """Prints rules of thumb with what the model says."""
    styles = {"holds": "green", "does not hold": "red", "depends": "yellow"}
    for claim in found:
        screen.line()
        screen.line(claim["rule"], "bold")
        screen.piece(f"  {claim['verdict']}: ", styles[claim["verdict"]])
        screen.line(claim["finding"])
