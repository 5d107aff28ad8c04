"""``jaxspec sizes``: what each device of a mesh holds and exchanges, by programs compiled for it at full size."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import tyro

from jaxspec.cli.arguments import set_aside
from jaxspec.cli.engine_flags import mesh_sizes
from jaxspec.cli.screen import Screen, amount
from jaxspec.errors import ConfigError

COLUMNS = ("model", "devices", "mesh", "weights", "KV", "state", "temp", "total", "room", "fits")
WITH_TRAIN = ("models", "hardware", "mesh", "train", "set", "layers", "json", "color")
SENT = ("model", "devices", "program", "layers", "exchanges", "other collectives")


@dataclass(frozen=True)
class SizesArgs:
    """Flags of ``jaxspec sizes``.

    Attributes:
      models: Shipped configs such as deepseek-v3, config.json files or model directories. No weights are read.
      hardware: Devices and how many: h200x8, or h200x16 for two machines of eight. They need not be there.
      mesh: Devices by axis, such as expert=8,tensor=2; by default all along expert, or tensor without experts.
      expert_transport: How rows reach the experts' devices.
      rows: Batch slots of all devices together.
      context: Longest text in tokens.
      topology: Drafted tokens K.
      programs: Which of plain, ngram, mtp, prefill, and heads as configs/heads names them (eagle3, dflash, ...), made
        for this model; by default plain, prefill, and mtp where there is one.
      train: A training config, a name in configs/train or a TOML file: compile an update of its head instead. Rows,
        context, topology and transport are then its own.
      set: A value that differs from that config's, such as train.micro_rows=1; may come again.
      quantization: Of models whose config is not quantized; others lie as published.
      kv_cache_dtype: How keys and values are cached, as for generate.
      layers: Compile only so many layers, at full width, which is quicker; 0 compiles all. Weights and caches are of
        all layers in any case.
      json: Print JSON.
      color: Color on a terminal.
    """

    GROUPS: ClassVar = {
        "device": ("hardware", "mesh", "expert_transport"),
        "program": ("rows", "context", "topology", "programs", "quantization", "kv_cache_dtype", "layers"),
        "training": ("train", "set"),
        "output": ("json", "color"),
    }

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL ...")]
    hardware: tuple[str, ...] = ("h200x8",)
    mesh: str = ""
    expert_transport: Literal["sum", "ragged"] = "ragged"
    rows: int = 64
    context: int = 8192
    topology: int = 5
    programs: tuple[str, ...] = ()
    train: str | None = None
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    quantization: Literal["auto", "fp8", "int8"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    layers: int = 0
    json: bool = False
    color: bool = True


def run(args: SizesArgs) -> int:
    """Prints the table, or JSON; returns 1 where something does not fit."""
    from jaxspec.inspect.shipped import model_config

    if args.train is None and args.set:
        raise ConfigError("sizes: --set changes the config of --train, which is not given")
    if args.train is not None and (given := set_aside(args, WITH_TRAIN)):
        raise ConfigError(f"sizes: --train compiles an update as its config says; leave {', '.join(given)} out")
    models = [model_config(name) for name in args.models]
    entries = [{"model": name, **_sizes(args, config, one)} for name, config in models for one in args.hardware]
    if args.json:
        sys.stdout.write(json.dumps(entries, indent=2) + "\n")
    else:
        show(entries, Screen(color=args.color))
    return 0 if all(sizes["fits"] for sizes in entries) else 1


def _sizes(args: SizesArgs, config: dict[str, Any], hardware: str) -> dict[str, Any]:
    """Returns what each device holds of one model."""
    from jaxspec.inspect.per_device import per_device, train_per_device

    mesh = mesh_sizes(args.mesh)
    if args.train is not None:
        return train_per_device(config, hardware, wanted=args.train, changes=args.set, mesh=mesh, layers=args.layers)
    return per_device(
        config, hardware, mesh=mesh, transport=args.expert_transport, rows=args.rows, capacity=args.context,
        drafts=args.topology, wanted=args.programs, quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype, layers=args.layers,
    )  # fmt: skip


def show(entries: list[dict[str, Any]], screen: Screen) -> None:
    """Prints a line per model and mesh, then one per program."""
    from rich.table import Table

    first = entries[0]
    if "length" in first:
        shape = f"an update, {first['rows']} rows of {first['length']} tokens together, {first['rounds']} rounds"
    else:
        shape = f"{first['rows']} rows of {first['capacity']} tokens, {first['drafts']} drafts"
        shape += f", rows reach experts by {first['transport']}"
    screen.line(f"{shape}; bytes of one device", "bold")
    sizes, programs = Table(*COLUMNS, box=None, pad_edge=False), Table(*SENT, box=None, pad_edge=False)
    for column in (*sizes.columns[3:], *programs.columns[3:5]):
        column.justify, column.no_wrap = "right", True
    for one in entries:
        axes = " ".join(f"{axis[0]}{n}" for axis, n in one["mesh"].items() if n > 1)
        where = (one["model"], f"{one['devices']} {one['hardware'].split()[1]}")
        parts = (amount(one[name]) for name in ("weights", "caches", "state", "temp", "total", "room"))
        fits, style = ("yes", None) if one["fits"] else ("no", "red")
        sizes.add_row(*where, axes, *parts, fits, style=style)
        for name, program in one["programs"].items():
            others = ", ".join(f"{n} {kind}" for kind, n in program["collectives"].items())
            programs.add_row(*where, name, str(one["compiled_layers"]), f"{program['exchanges']:g}", others)
    for table in (sizes, programs):
        screen.console.print(table)
        screen.line()
    screen.line(
        "KV: caches at full length; temp: of the program that needs most; room: the share of the memory that may be "
        "used; state: of an update, head and optimizer; exchanges: per expert layer that runs; other collectives: per "
        "step or update of the layers compiled",
        "dim",
    )
