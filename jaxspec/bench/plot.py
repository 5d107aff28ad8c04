"""Pictures of a report: speed-up and experts against rows, acceptance by position."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxspec.bench.record import Cell, Report
from jaxspec.bench.tables import heading
from jaxspec.errors import ConfigError


def missing() -> str | None:
    """What has to be installed before anything can be drawn, None if it is there."""
    return None if find_spec("matplotlib") else "pictures need matplotlib: pip install 'jaxspec[plots]'"


def draw(report: Report, folder: Path) -> list[Path]:
    """Writes PNG files, one for each workload, temperature, lengths and arrival.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    why = missing()
    if why:
        raise ConfigError(f"bench: {why}, or --no-plots")
    files = []
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in report.cells:
        if cell.speculative is not None:
            group = (cell.workload, cell.input_tokens, cell.output_tokens, cell.temperature, cell.arrival)
            groups.setdefault(group, []).append(cell)
    for number, (group, cells) in enumerate(groups.items()):
        workload, inputs, outputs, temperature, arrival = group
        title = f"{workload} {inputs or 'natural'}+{outputs}, T={temperature:g}, {arrival}"
        file = folder / f"bench-{number}-{workload}.png"
        _picture(f"{heading(report)}\n{title}", cells, file)
        files.append(file)
    return files


def _picture(title: str, cells: Sequence[Cell], file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    left, middle, right = figure.subplots(1, 3)
    _against_rows(left, cells, _spread)
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set(title="speed-up over plain decoding", xlabel="rows", ylabel="times")
    if any(cell.experts for cell in cells):
        _against_rows(middle, [c for c in cells if c.experts], lambda c: (c.experts.speculative,) * 3)
        middle.set(title="distinct experts per layer and verification", xlabel="rows", ylabel="experts")
    else:
        middle.set_axis_off()
    fewest = {_name(cell): cell for cell in sorted(cells, key=lambda cell: -cell.concurrency)}
    for name, cell in fewest.items():
        if cell.acceptance is not None and cell.acceptance.per_pos:
            rates = cell.acceptance.per_pos
            right.plot(range(1, len(rates) + 1), rates, marker=".", label=f"{name}, {cell.concurrency} rows")
    right.set(title="accepted up to draft", xlabel="draft", ylabel="share of verifications", ylim=(0, 1))
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, middle, right):
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)


def _against_rows(axes: Any, cells: Sequence[Cell], value: Callable[[Any], tuple[float, float, float]]) -> None:
    lines: dict[str, list[tuple[int, tuple[float, float, float]]]] = {}
    for cell in cells:
        lines.setdefault(_name(cell), []).append((cell.concurrency, value(cell)))
    for name, found in lines.items():
        rows = [r for r, _ in sorted(found)]
        median, least, most = zip(*(v for _, v in sorted(found)), strict=True)
        below = [m - x for m, x in zip(median, least, strict=True)]
        above = [x - m for m, x in zip(median, most, strict=True)]
        axes.errorbar(rows, median, yerr=(below, above), marker="o", capsize=3, label=name)
    every = sorted({cell.concurrency for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, labels=[str(rows) for rows in every])


def _spread(cell: Cell) -> tuple[float, float, float]:
    found = cell.speedup
    return (found.median, found.least, found.most) if found is not None else (1.0, 1.0, 1.0)


def _name(cell: Cell) -> str:
    return f"{cell.drafter} K={cell.k}"
