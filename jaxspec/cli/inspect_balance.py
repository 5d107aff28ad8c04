"""What ``jaxspec inspect DIR --balance`` measures and shows: experts by load, and placements on devices."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.bench.expert_load import Measured
    from jaxspec.cli.screen import Screen

DEVICES = (2, 4, 8)
WORDS = {"prompt": "prompts", "committed": "text", "rejected": "rejected drafts"}


@dataclass(frozen=True)
class BalanceFlags:
    """How the load of experts is measured and balanced.

    Attributes:
      balance: Load the model, count how often each expert is chosen, and show how evenly devices along the axis expert
        would be loaded (--devices, by default 2 4 8).
      prompts: JSONL as for jaxspec generate, or any other file as one text; by default the demo's held-out code.
      texts: Most prompts that are read.
      tokens: Generated per prompt, greedily, --rows together; 0 counts the prompts alone.
      speculative_config: JSON as for jaxspec generate; then drafts count too, and predictions of experts are compared.
      redundant: Slots per layer beyond its experts, for replicas of heavy ones; rounded up to a multiple.
      output: File for the placement, which generate --expert-placement takes; needs one number of --devices.
      record: File for the counts.
      load: Counts of an earlier --record, instead of measuring.
    """

    balance: tyro.conf.FlagCreatePairsOff[bool] = False
    prompts: Path | None = None
    texts: int = 64
    tokens: int = 64
    speculative_config: str | None = None
    redundant: int = 0
    output: Path | None = None
    record: Path | None = None
    load: Path | None = None


@dataclass(frozen=True)
class Setting:
    """What of the other flags matters.

    Attributes:
      path: model directory.
      devices: numbers of devices.
      rows: verifications per batch.
      dtype, quantization: of the weights.
    """

    path: Path
    devices: tuple[int, ...]
    rows: int
    dtype: str
    quantization: str


def inspect_balance(flags: BalanceFlags, setting: Setting, *, as_json: bool, color: bool) -> int:
    """Measures or reads the load, prints the report, and writes what is asked for.

    Raises:
      ConfigError: the flags contradict each other, or model, prompts or drafter are not usable.
    """
    from jaxspec.bench.balance import balance, placement_for
    from jaxspec.cli.screen import Screen
    from jaxspec.perf.expert_load import read_load, save_load
    from jaxspec.perf.expert_placement import save_placement

    devices = setting.devices or DEVICES
    if flags.output is not None and len(devices) != 1:
        raise ConfigError("inspect: a placement is for one number of devices; give --output one number of --devices")
    if min(devices) < 1 or flags.redundant < 0 or flags.tokens < 0 or min(flags.texts, setting.rows) < 1:
        raise ConfigError("inspect: --devices, --texts and --rows are at least 1, --redundant and --tokens at least 0")
    measured = None
    if flags.load is None:
        measured = _measure(flags, setting)
    load = measured.load if measured is not None else read_load(flags.load or Path())
    if flags.record is not None:
        save_load(load, flags.record)
    found = balance(load, measured, devices, flags.redundant, setting.rows)
    if flags.output is not None:
        save_placement(placement_for(load, devices[0], flags.redundant), flags.output)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        show(found, setting.rows, Screen(color))
    return 0


def _measure(flags: BalanceFlags, setting: Setting) -> "Measured":
    from jaxspec.bench.expert_load import Wanted, measure_load, texts_of
    from jaxspec.cli.engine_flags import speculation
    from jaxspec.draft import catalog
    from jaxspec.serve.loading import load_target

    config = catalog.parse(speculation(flags.speculative_config))
    model = load_target(
        setting.path, dtype=setting.dtype, kernels="auto", quantization=setting.quantization, mesh=None,
        transport="auto", placement=None, rows=setting.rows, on_load=None,
    )  # fmt: skip
    prompts, source = texts_of(model, flags.prompts, flags.texts, flags.tokens)
    return measure_load(model, prompts, Wanted(flags.tokens, setting.rows, source), config)


def show(found: dict[str, Any], rows: int, screen: "Screen") -> None:
    """Prints a report for people."""
    from rich.table import Table

    counts = ", ".join(f"{n:,} positions of {WORDS[kind]}" for kind, n in found["positions"].items() if n)
    screen.line(f"{found['model'].get('name', '')}   {found['source']}", "bold")
    length = found.get("acceptance_length")
    screen.line(counts + (f"; acceptance length {length:.2f}" if length else ""))
    screen.line("imbalance: load of the heaviest device over the mean one, 1 is even")
    table = Table("devices", "placement", "slots", "mean", "worst layer", *_words(found), title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    drawn = any(p.get("batches") for d in found["devices"] for p in d["placements"].values())
    if drawn:
        for name in (f"{rows} rows", "experts read", "most read"):
            table.add_column(name, justify="right")
    for entry in found["devices"]:
        for name, p in entry["placements"].items():
            cells = [str(entry["devices"]), name, str(p["slots"]), f"{p['mean']:.2f}", f"{p['worst']:.2f}"]
            cells += [f"{value:.2f}" for value in p["kinds"].values()]
            batches = p.get("batches") or {}
            table.add_row(*cells, *(f"{batches[key]:.2f}" for key in ("rows", "experts", "read") if key in batches))
    screen.console.print(table)
    if drawn:
        screen.line(
            f"the last three: batches of {rows} real verifications, of the half of the texts that did not place them; "
            "imbalance in routed rows, in experts that devices read, and how many the heaviest reads"
        )
    _show_layers(found, screen)
    if "predicted" in found:
        _show_predicted(found["predicted"], screen)


def _words(found: dict[str, Any]) -> list[str]:
    kinds = [WORDS[kind] for kind, n in found["positions"].items() if n]
    return kinds if len(kinds) > 1 else []


def _show_layers(found: dict[str, Any], screen: "Screen") -> None:
    from rich.table import Table

    names = [(d["devices"], name) for d in found["devices"] for name in d["placements"]]
    table = Table("layer", "hottest experts", "never chosen", title="by layer", title_justify="left")
    for n, name in names:
        table.add_column(f"{n} {name[:4]}.", justify="right")
    for place, layer in enumerate(found["layers"]):
        hottest = ", ".join(f"{e} {share:.1%}" for e, share in layer["hottest"])
        by_layer = [
            f"{p['by_layer'][place]:.2f}" for d in found["devices"] for p in d["placements"].values()
        ]  # fmt: skip
        table.add_row(str(layer["layer"]), hottest, _some(layer["dead"]), *by_layer)
    screen.console.print(table)


def _some(numbers: list[int], most: int = 4) -> str:
    words = " ".join(map(str, numbers[:most]))
    return words + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def _show_predicted(found: dict[str, Any], screen: "Screen") -> None:
    from rich.table import Table

    layers = " ".join(map(str, found["layers"]))
    table = Table(
        "devices", "contiguous: predicted", "measured", "balanced by prediction: predicted", "measured",
        "balanced by measurement", title=f"drafts in the predicted layers {layers}", title_justify="left",
    )  # fmt: skip
    for entry in found["devices"]:
        number, *values = entry.values()
        table.add_row(str(number), *(f"{value:.2f}" for value in values))
    screen.console.print(table)
