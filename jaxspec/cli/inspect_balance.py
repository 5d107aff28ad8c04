"""What ``jaxspec inspect DIR --balance`` measures and shows: experts by load, and placements on devices."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.cli.screen import Screen
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from jaxspec.checkpoint.load.model import Model
    from jaxspec.inspect.measured_load import MeasuredLoad
    from jaxspec.perf.expert_counts import ExpertLoad

DEVICES = (2, 4, 8)
LONGEST = 512  # tokens of a prompt
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

    GROUP: ClassVar = "expert balance"

    balance: bool = False
    prompts: Path | None = None
    texts: int = 64
    tokens: int = 64
    speculative_config: str | None = None
    redundant: int = 0
    output: Path | None = None
    record: Path | None = None
    load: Path | None = None


@dataclass(frozen=True)
class BalanceSetting:
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


def inspect_balance(flags: BalanceFlags, setting: BalanceSetting, *, as_json: bool, color: bool) -> int:
    """Measures or reads the load, prints the report, and writes what is asked for.

    Raises:
      ConfigError: the flags contradict each other, or model, prompts or drafter are not usable.
    """
    from jaxspec.inspect.balance import balance, placement_for
    from jaxspec.perf.expert_counts import save_load
    from jaxspec.perf.expert_placement import save_placement

    devices = setting.devices or DEVICES
    if flags.output is not None and len(devices) != 1:
        raise ConfigError("inspect: a placement is for one number of devices; give --output one number of --devices")
    if min(devices) < 1 or flags.redundant < 0 or flags.tokens < 0 or min(flags.texts, setting.rows) < 1:
        raise ConfigError("inspect: --devices, --texts and --rows are at least 1, --redundant and --tokens at least 0")
    measured = None
    if flags.load is None:
        measured = _measure(flags, setting)
    load = measured.load if measured is not None else _recorded(flags.load or Path(), setting.path)
    if flags.record is not None:
        save_load(load, flags.record)
    report = balance(load, measured, devices, flags.redundant, setting.rows)
    if flags.output is not None:
        save_placement(placement_for(load, devices[0], flags.redundant), flags.output)
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        show(report, setting.rows, Screen(color=color))
    return 0


def _recorded(file: Path, directory: Path) -> "ExpertLoad":
    from jaxspec.checkpoint.files.fingerprint import digests
    from jaxspec.checkpoint.load.model import read_config
    from jaxspec.perf.expert_counts import read_load

    load = read_load(file)
    if load.model.get("config_digest") != digests(read_config(directory))["config_digest"]:
        raise ConfigError(
            f"{file}: counts of another model ({load.model.get('name')}) than {directory}; measure this one"
        )
    return load


def _measure(flags: BalanceFlags, setting: BalanceSetting) -> "MeasuredLoad":
    from jaxspec.cli.engine_flags import speculation
    from jaxspec.draft import methods
    from jaxspec.inspect.measured_load import LoadSettings, measure_load
    from jaxspec.serve.loading import load_target

    config = methods.parse(speculation(flags.speculative_config))
    model = load_target(
        setting.path, dtype=setting.dtype, kernels="auto", quantization=setting.quantization, rows=setting.rows
    )
    prompts, source = _texts_of(model, flags.prompts, flags.texts, flags.tokens)
    return measure_load(model, prompts, LoadSettings(flags.tokens, setting.rows, source), config)


def _texts_of(model: "Model", file: Path | None, most: int, tokens: int) -> tuple[list[list[int]], str]:
    """Returns the token ids to read, and a description of them.

    Args:
      model: whose tokenizer and context count.
      file: JSONL of prompts, or any other file as one text, which is cut; None for the held-out code of the demo.
      most: texts.
      tokens: generated after each; what is too long for them in front is cut off.

    Raises:
      ConfigError: there is no such file or nothing in it, or the model has no tokenizer for it.
    """
    from jaxspec.bench.prompt_source import PromptSource
    from jaxspec.checkpoint.text.codec import Text

    arch, text = model.net.arch, Text.load(model.directory)
    size = min(LONGEST, arch.max_position - tokens)
    if size < 1:
        raise ConfigError(f"balance: {tokens} tokens leave no room for a prompt within {arch.max_position}")
    if text is None and (file is None or file.suffix != ".jsonl"):
        raise ConfigError(f"{model.directory}: no tokenizer; give --prompts a .jsonl with prompt_token_ids")
    if text is None or file is None or file.suffix == ".jsonl":
        source = PromptSource(text, arch.vocab_size, {} if file is None else {"file": file})
        texts = source.pool("held-out" if file is None else "file")
    else:
        try:
            ids = text.encode(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read as text ({error})") from error
        texts = [ids[at : at + size] for at in range(0, len(ids), size)]
    if not texts:
        raise ConfigError(f"{file}: nothing in it; give a file with text")
    words = "held-out code of the demo" if file is None else file.name
    return [ids[-size:] for ids in texts[:most]], f"{len(texts[:most])} texts of {words}"


def show(report: dict[str, Any], rows: int, screen: Screen) -> None:
    """Prints a report for people."""
    counts = ", ".join(f"{n:,} positions of {WORDS[kind]}" for kind, n in report["positions"].items() if n)
    screen.line(f"{report['model'].get('name', '')}   {report['source']}", "bold")
    length = report.get("acceptance_length")
    screen.line(counts + (f"; acceptance length {length:.2f}" if length else ""))
    screen.line("imbalance: load of the heaviest device over the mean one, 1 is even")
    kinds = [kind for kind, n in report["positions"].items() if n]
    placements = [(entry["devices"], name, p) for entry in report["devices"] for name, p in entry["placements"].items()]
    table = _table("devices", "placement", "slots", "all layers", "worst layer", *(WORDS[k] for k in kinds), words=2)
    for n, name, p in placements:
        values = [p["mean"], p["worst"], *(p["kinds"][kind] for kind in kinds)]
        table.add_row(str(n), name, str(p["slots"]), *(f"{value:.2f}" for value in values))
    screen.console.print(table)
    if any(p.get("batches") for _, _, p in placements):
        screen.line(f"in batches of {rows} rows of one half of the texts, placed by the other half")
        table = _table("devices", "placement", "rows, plain", "verified", "experts read", "most read", words=2)
        for n, name, p in placements:
            table.add_row(str(n), name, *(f"{value:.2f}" for value in p["batches"].values()))
        screen.console.print(table)
    _show_layers(report, screen)
    if "predicted" in report:
        _show_predicted(report["predicted"], screen)


def _table(*columns: str, words: int) -> "Table":
    """Returns a table whose columns after the first few are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < words else "right", no_wrap=True)
    return table


def _show_layers(report: dict[str, Any], screen: Screen) -> None:
    names = list(report["devices"][0]["placements"])
    table = _table(
        "layer", "hottest experts", "never", *(f"{d['devices']} devices" for d in report["devices"]), words=3
    )
    for place, layer in enumerate(report["layers"]):
        hottest = "  ".join(f"{e}: {share:.0%}" for e, share in layer["hottest"])
        each = [
            " ".join(f"{p['by_layer'][place]:.2f}" for p in d["placements"].values()) for d in report["devices"]
        ]  # fmt: skip
        table.add_row(str(layer["layer"]), hottest, _some(layer["dead"]), *each)
    screen.line(f"by layer: {', '.join(names)}")
    screen.console.print(table)


def _some(numbers: list[int], most: int = 4) -> str:
    words = " ".join(map(str, numbers[:most]))
    return words + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def _show_predicted(predicted: dict[str, Any], screen: Screen) -> None:
    screen.line(
        f"drafts in layers {', '.join(map(str, predicted['layers']))}, by the head's predictions and by what the "
        "target chose for the same drafts"
    )
    table = _table("devices", "placement", "predicted", "measured", words=2)
    for entry in predicted["devices"]:
        n = str(entry["devices"])
        for name in ("contiguous", "balanced_by_prediction"):
            said, came = entry[f"{name}_predicted"], entry[name]
            table.add_row(n, name.replace("_", " "), f"{said:.2f}", f"{came:.2f}")
        table.add_row(n, "balanced by measurement", "", f"{entry['balanced']:.2f}")
    screen.console.print(table)
