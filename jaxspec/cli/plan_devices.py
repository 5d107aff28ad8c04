"""``jaxspec plan --devices``: one model on more and more devices, and what they send each other."""

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from jaxspec.cli.plan_question import PlanArgs, machine_of, question_of
from jaxspec.cli.screen import Screen
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.perf.scaling import Scale

ROWS = 8
COLUMNS = ("devices", "mesh", "plain", "best", "gain", "range", "tok/s", "effic.", "rounds", "MB", "far")


def run(args: PlanArgs) -> int:
    """Plans for every number of devices, and prints a table or JSON.

    Raises:
      ConfigError: the arguments contradict each other, or ``jaxspec plan`` refuses one of the numbers.
    """
    from jaxspec.perf.scaling import scaling

    if args.hardware is None or args.mesh is not None or args.rules or args.plot is not None:
        raise ConfigError(
            "plan: --devices needs --hardware, and goes without --calibration, --mesh, --rules and --plot"
        )
    batch = (ROWS,) if args.batch == PlanArgs.batch else args.batch
    if len(batch) != 1 or min(args.devices) < 1:
        raise ConfigError(f"plan: --devices takes one --batch, rows per device, and numbers from 1; got {batch}")
    hardware, count = machine_of(args.hardware)
    if count != 1:
        raise ConfigError(f"plan: --devices says how many; give --hardware without a count, got {args.hardware}")
    asked = [question_of(replace(args, hardware=f"{args.hardware}x{n}")) for n in sorted(set(args.devices))]
    scales = scaling([question for question, _ in asked], batch[0], hardware.node_devices)
    model = asked[0][0].model.name
    if args.json:
        about = {"model": model, "hardware": hardware.name, "rows_per_device": batch[0]}
        sys.stdout.write(json.dumps({**about, "devices": [_record(scale) for scale in scales]}, indent=2) + "\n")
        return 0
    show(
        f"{model} on {hardware.name}, {batch[0]} rows per device, {args.context} tokens each", scales, color=args.color
    )
    return 0


def _record(scale: "Scale") -> dict[str, Any]:
    """Returns a number of devices ready for JSON."""
    record = asdict(scale)
    record["batch"]["memory"]["total_bytes"] = scale.batch.memory.total_bytes
    return record | {"mesh": asdict(scale.mesh), "fits": scale.batch.memory.fits}


def show(title: str, scales: tuple["Scale", ...], *, color: bool) -> None:
    """Prints the numbers of devices for people."""
    from rich.table import Table

    screen = Screen(color=color)
    screen.line(title, "bold")
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for s in scales:
        o, fits = s.batch.best, s.batch.memory.fits
        axes = " ".join(f"{axis[0]}{n}" for axis, n in asdict(s.mesh).items() if n > 1)
        table.add_row(
            f"{'' if fits else '! '}{s.devices}", axes, f"{s.batch.plain_tok_per_s:.0f}",
            f"{o.kind} {shape_words(o.branching)}", f"{o.speedup:.2f}x", f"{o.low:.2f}-{o.high:.2f}",
            f"{o.tok_per_s:.0f}", "" if s.efficiency is None else f"{s.efficiency:.2f}",
            f"{s.exchanges + s.sums}", f"{s.plain_bytes / 1e6:.0f}>{s.verify_bytes / 1e6:.0f}", f"{s.far_share:.0%}",
        )  # fmt: skip
    screen.console.print(table)
    screen.line(
        "plain, tok/s: tokens per second of all devices; effic.: per device, over the first that fits; rounds: "
        "collectives of a step, as many for verification as for plain decoding; MB: that a device sends in a step, "
        "plain and verifying, and the far share of it that leaves the node; ! does not fit",
        "dim",
    )


def shape_words(branching: tuple[int, ...]) -> str:
    """Returns ``K=3`` for a chain, ``2x2x1`` for a tree."""
    return f"K={len(branching)}" if set(branching) == {1} else "x".join(map(str, branching))
