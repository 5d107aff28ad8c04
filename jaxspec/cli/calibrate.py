"""``jaxspec calibrate``: measures a model on this machine and writes what ``jaxspec plan`` can predict from."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from jaxspec.cli.screen import Screen
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.perf.calibration import Calibration
    from jaxspec.perf.held_out import HeldOut

PROMPTS = Path(__file__).parents[1] / "demo_model" / "held_out_prompts.json"


@dataclass(frozen=True)
class CalibrateArgs:
    """Flags of ``jaxspec calibrate``.

    Attributes:
      model: Model directory in Hugging Face layout, a hub id, or demo, the packaged model.
      output: File that gets the calibration.
      speculative_config: JSON with vLLM's keys, without a length, which --lengths gives.
      text: File of real text that rows continue, the longer the better; by default the demo's held-out prompts.
      rows: Rows decoded together, ascending.
      lengths: Drafts per step, 0 among them, ascending.
      contexts: Cached positions per row, ascending; all pairs of rows and lengths are measured at the first.
      rounds: Measured rounds over all cells, after one that warms up.
      steps: Steps per timed dispatch.
      held_out_rows: Further rows, measured in the same rounds but not fitted: how well are they predicted?
      held_out_lengths: Further drafts per step, likewise.
      dtype: Of weights and activations; auto takes the checkpoint's.
      quantization: As for generate.
      color: Color on a terminal.
    """

    GROUPS: ClassVar = {
        "grid": ("rows", "lengths", "contexts", "rounds", "steps", "held_out_rows", "held_out_lengths"),
        "engine": ("speculative_config", "dtype", "quantization"),
        "output": ("output", "color"),
    }

    model: Annotated[str, tyro.conf.Positional] = "demo"
    output: Path = Path("calibration.json")
    speculative_config: Annotated[str, tyro.conf.arg(metavar="JSON")] = '{"method": "ngram"}'
    text: Path | None = None
    rows: tuple[int, ...] = (1, 2, 4, 8)
    lengths: tuple[int, ...] = (0, 1, 3, 7)
    contexts: tuple[int, ...] = (128, 1024)
    rounds: int = 9
    steps: int = 8
    held_out_rows: tuple[int, ...] = ()
    held_out_lengths: tuple[int, ...] = ()
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantization: Literal["auto", "none", "fp8", "int8"] = "auto"
    color: bool = True


def run(args: CalibrateArgs) -> int:
    """Measures, fits, writes and shows."""
    from jaxspec.bench.calibrate import CalibrationGrid, calibrate, cost_of
    from jaxspec.cli.engine_flags import load_llm
    from jaxspec.perf.calibration import save_calibration
    from jaxspec.perf.held_out import judge
    from jaxspec.serve.demo_pair import resolve_model, resolve_speculation
    from jaxspec.serve.llm import LLM

    grid = CalibrationGrid(
        args.rows, args.lengths, args.contexts, args.rounds, args.steps, args.held_out_rows, args.held_out_lengths
    )
    try:
        speculative: Any = json.loads(args.speculative_config)
    except ValueError as error:
        raise ConfigError(f"--speculative-config: not valid JSON ({error})") from error
    if not isinstance(speculative, dict):
        raise ConfigError(f"--speculative-config: a JSON object is needed, got {args.speculative_config}")
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {args.output.parent}")
    model, speculative = resolve_model(args.model), dict(resolve_speculation(speculative) or {})
    texts = _texts(args.text)

    def load(what: Any, **keywords: Any) -> LLM:
        return load_llm(what, quiet=screen.color, **keywords)  # one moving sign at a time

    screen = Screen(color=args.color)
    cells, engines = len(grid.cells()) + len(grid.held_out()), len(grid.all_rows)
    doing = f"compiling {len(grid.all_lengths)} programs for each of {engines} numbers of rows (kept for the next time)"
    with screen.counting(f"{doing}, then measuring {cells} cells in {grid.rounds} rounds") as count:
        calibration = calibrate(
            model, texts, speculative=speculative, grid=grid, load=load, show=count,
            dtype=args.dtype, quantization=args.quantization,
        )  # fmt: skip
    save_calibration(calibration, args.output)
    show(calibration, screen)
    if any(p.length for p in calibration.held_out):
        show_held_out(judge(calibration, cost_of(calibration, model)), screen)
    sys.stderr.write(f"jaxspec: {args.output} written\n")
    return 0


def _texts(file: Path | None) -> list[str]:
    from jaxspec.bench.excerpts import load_excerpts

    if file is None:
        return [excerpt.prompt for excerpt in load_excerpts(PROMPTS)]
    try:
        return [file.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {file} cannot be read ({error})") from None


def show(calibration: "Calibration", screen: Screen) -> None:
    """Prints a calibration for people: the raw table, the fits, and how much experts overlap."""
    from rich.table import Table

    table = Table("rows", "K", "context", "step", "drafting", "spread", title_justify="left")
    for p in calibration.points:
        table.add_row(
            *map(str, (p.rows, p.length, p.context)), f"{p.step_s * 1e3:.2f} ms", f"{p.draft_s * 1e3:.2f} ms",
            f"{p.spread:.1%}",
        )  # fmt: skip
    screen.console.print(table)
    rates = Table("rate", "seconds per unit", "95 % interval", title_justify="left")
    for name, value in calibration.fit.rates.items():
        low, high = calibration.fit.interval[name]
        rates.add_row(name, f"{value:.3g}", f"{low:.2g} to {high:.2g}")
    screen.console.print(rates)
    for name, fit in (("with experts", calibration.fit), ("tokens alone", calibration.token_count_fit)):
        held = "" if fit.held_out_error is None else f", {fit.held_out_error:.1%} where the cell is held out"
        screen.line(f"error of the formula {name}: {fit.error:.1%}{held}")
    screen.line(f"noise floor: {calibration.noise_floor:.1%} between rounds of the same cell")
    if calibration.overlap is not None:
        row = list(zip(calibration.overlap.positions, _mean(calibration.overlap.share), strict=True))
        words = ", ".join(f"{positions}: {share:.2f}" for positions, share in row)
        screen.line(f"experts touched by neighboring positions of a row, share of the independent count: {words}")


def show_held_out(held_out: "HeldOut", screen: Screen) -> None:
    """Prints how well cells were predicted that nothing was fitted to."""
    from rich.table import Table

    title = f"{held_out.cells} cells held out; does speculation pay, at 13 acceptances: {held_out.questions} questions"
    table = Table("predicted by", "error", "worst", "of step ratios", "right", "right beyond noise", title=title)
    for name, by in (
        ("formula and table", held_out.predicted), ("formula", held_out.formula), ("tokens alone", held_out.token_count)
    ):  # fmt: skip
        table.add_row(
            name, f"{by.verify_error:.1%}", f"{by.worst:.1%}", f"{by.ratio_error:.1%}",
            f"{by.right / held_out.questions:.1%}",
            f"{by.right_when_clear / max(held_out.clear, 1):.1%} of {held_out.clear}",
        )  # fmt: skip
    screen.console.print(table)


def _mean(share: Any) -> list[float]:
    """Returns means over layers, at the fewest rows."""
    return [sum(layer[0][i] for layer in share) / len(share) for i in range(len(share[0][0]))]
