"""``jaxspec plan --train``: memory and time of a head's updates, before anything is loaded."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxspec.cli.arguments import set_aside
from jaxspec.cli.plan_question import PlanArgs, machine_of, parse_mesh
from jaxspec.cli.screen import Screen, amount
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.inspect.train_cost import UpdatePlan
    from jaxspec.perf.hardware import Hardware
    from jaxspec.train.settings import RunSettings

TAKEN = ("model", "hardware", "mesh", "train", "set", "json", "color")


def run(args: PlanArgs) -> int:
    """Plans the updates of a training config, and prints them; returns 1 where they do not fit.

    Raises:
      ConfigError: the arguments contradict each other, or the config does not suit the model or the mesh.
    """
    from jaxspec.inspect.shipped import model_config
    from jaxspec.inspect.train_cost import plan_update
    from jaxspec.train.settings import load_run_settings

    given = set_aside(args, TAKEN)
    if args.hardware is None or given:
        words = ", ".join(given) or "no --hardware"
        raise ConfigError(f"plan: --train takes --hardware, --mesh, --set and --json; got {words}; leave the rest out")
    hardware, count = machine_of(args.hardware)
    mesh = parse_mesh(args.mesh)
    sizes = [] if mesh is None else [f"mesh.{axis}={size}" for axis, size in asdict(mesh).items()]
    settings = load_run_settings(str(args.train), [*args.set, *sizes])
    m = settings.mesh
    if (devices := m.data * m.expert * m.tensor) != count:
        raise ConfigError(
            f"plan: the mesh has {devices} devices, --hardware {args.hardware} has {count}; give --mesh, for example "
            f"--mesh expert={count}"
        )
    name, config = model_config(args.model)
    plan = plan_update(settings, config, hardware)
    record = _record(name, settings, hardware, plan)
    if args.json:
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        show(record, plan, hardware, Screen(color=args.color))
    return 0 if record["fits"] else 1


def _record(name: str, settings: "RunSettings", hardware: "Hardware", plan: "UpdatePlan") -> dict[str, Any]:
    """Returns a plan ready for JSON; bytes are those of one device."""
    t, memory = settings.train, plan.memory
    mesh = {axis: getattr(settings.mesh, axis) for axis in ("data", "expert", "tensor")}
    return {
        "model": name, "hardware": hardware.name, "mesh": mesh, "head": settings.head.kind,
        "rows": t.rows, "accumulation": t.accumulation, "length": settings.data.length, "rounds": settings.loss.rounds,
        "micro_rows": memory.rows, "remat": memory.remat, "memory": dict(memory.needed), "total_bytes": memory.total,
        "room_bytes": memory.room, "memory_bytes": int(hardware.memory_bytes),
        "fits": memory.room is None or memory.total <= memory.room,
        "time_s": plan.time_s, "time_range_s": plan.range_s, "time_by_cause_s": dict(plan.seconds),
        "tokens_per_s": plan.tokens_per_s,
        "flops": dict(plan.flops), "mfu": plan.mfu, "updates": t.steps or None,
        "hours": plan.time_s * t.steps / 3600 if t.steps else None,
    }  # fmt: skip


def show(record: dict[str, Any], plan: "UpdatePlan", hardware: "Hardware", screen: Screen) -> None:
    """Prints a plan for people."""
    devices = record["mesh"]["data"] * record["mesh"]["expert"] * record["mesh"]["tensor"]
    axes = ", ".join(f"{axis}={n}" for axis, n in record["mesh"].items() if n > 1)
    where = f"{devices} x {hardware.name}" + (f", mesh {axes}" if axes else "")
    rows = f"{record['rows']} rows of {record['length']} tokens"
    screen.line(f"{record['head']} head for {record['model']} on {where}; an update has {rows}", "bold")
    again = ", rounds computed again for their gradients" if record["remat"] else ""
    screen.line(f"computed together: {record['micro_rows']} rows{again}")
    parts = ", ".join(f"{part} {amount(size)}" for part, size in record["memory"].items() if size)
    fits = "fits" if record["fits"] else "does not fit; take fewer train.micro_rows, train.remat=true or more devices"
    screen.line(
        f"memory of a device: {parts}; {amount(record['total_bytes'])} of {amount(record['room_bytes'])} that may be "
        f"used of {amount(record['memory_bytes'])}: {fits}",
        "" if record["fits"] else "red",
    )
    fast, slow = record["time_range_s"]
    causes = ", ".join(f"{cause} {seconds:.3g}" for cause, seconds in plan.seconds.items() if seconds)
    screen.line(f"an update: {plan.time_s:.3g} s, from {fast:.3g} to {slow:.3g} ({causes})")
    hours = f"; {record['updates']} updates: {record['hours']:.3g} hours" if record["hours"] else ""
    screen.line(f"{plan.tokens_per_s:,.0f} tokens/s, MFU {plan.mfu:.1%}{hours}")
    low, likely, high = hardware.assumed.compute
    screen.line(
        f"assumed: products reach {likely:.0%} ({low:.0%} to {high:.0%}) of {hardware.bf16_tflops:g} TFLOP/s, memory "
        f"{hardware.assumed.bandwidth[1]:.0%} of {hardware.memory_gb_per_s:g} GB/s; reading data, evaluation and "
        "checkpoints not counted; MFU counts nothing that is computed again",
        "dim",
    )
