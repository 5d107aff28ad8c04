"""Pictures of a report: speed-up and experts against rows, acceptance by position."""

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxspec.bench.record import BenchReport, SweepCell
from jaxspec.bench.tables import heading
from jaxspec.whole_file import write_whole

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")


def missing() -> str | None:
    """Says what to install before anything can be drawn, None if it is there."""
    return None if find_spec("matplotlib") else "pictures need matplotlib: pip install 'jaxspec[plots]'"


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Writes PNG files, one for each workload, temperature, lengths and arrival."""
    files = []
    groups: dict[tuple[Any, ...], list[SweepCell]] = {}
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


def _picture(title: str, cells: Sequence[SweepCell], file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    looks = looks_of(cells)
    figure = Figure(figsize=(16, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    left, middle, right = figure.subplots(1, 3)
    left.axhline(1.0, color="0.55", linewidth=1.5, label="plain decoding")
    _against_rows(left, cells, _spread, looks)
    left.set(title="speed-up over plain decoding (median, all rounds)", ylabel="tokens/s over plain tokens/s")
    if any(cell.experts for cell in cells):
        _against_rows(middle, [c for c in cells if c.experts], lambda c: (c.experts.speculative,) * 3, looks)
        middle.set(title="experts that a verification reads", ylabel="distinct experts per layer", ylim=(0, None))
    else:
        middle.set_axis_off()
    fewest = {_name(cell): cell for cell in sorted(cells, key=lambda cell: -cell.concurrency)}
    for name, cell in fewest.items():
        if cell.acceptance is not None and cell.acceptance.per_pos:
            rates = cell.acceptance.per_pos
            right.plot(range(1, len(rates) + 1), rates, markersize=4, label=name, **looks[name])
    fewest = min(cell.concurrency for cell in cells)
    rows = "1 row" if fewest == 1 else f"{fewest} rows"
    right.set(
        title=f"share of verifications that accept draft 1, 2, ... (at {rows})",
        xlabel="draft", ylabel="share of verifications", ylim=(0, 1.02),
    )  # fmt: skip
    right.xaxis.get_major_locator().set_params(integer=True)
    lines: dict[str, Any] = {}
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        lines |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = min(len(lines), 6)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=columns, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(file, picture.getvalue())


def looks_of(cells: Sequence[SweepCell]) -> dict[str, dict[str, Any]]:
    """Returns the look of every line in all panels: a drafter has a color, a K a marker and a dash."""
    drafters, lengths = (list(dict.fromkeys(values)) for values in ((c.drafter for c in cells), (c.k for c in cells)))
    return {
        _name(c): {
            "color": f"C{drafters.index(c.drafter) % 10}",
            "marker": MARKERS[lengths.index(c.k) % len(MARKERS)],
            "linestyle": DASHES[lengths.index(c.k) % len(DASHES)],
        }
        for c in cells
    }


def _against_rows(
    axes: Any, cells: Sequence[SweepCell], value: Callable[[Any], tuple[float, float, float]], looks: dict[str, Any]
) -> None:
    lines: dict[str, list[tuple[int, tuple[float, float, float]]]] = {}
    for cell in cells:
        lines.setdefault(_name(cell), []).append((cell.concurrency, value(cell)))
    for name, points in lines.items():
        rows = [r for r, _ in sorted(points)]
        median, least, most = zip(*(v for _, v in sorted(points)), strict=True)
        below = [m - x for m, x in zip(median, least, strict=True)]
        above = [x - m for m, x in zip(median, most, strict=True)]
        axes.errorbar(rows, median, yerr=(below, above), markersize=4, capsize=3, label=name, **looks[name])
    every = sorted({cell.concurrency for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, labels=[str(rows) for rows in every])
    axes.minorticks_off()
    axes.set_xlabel("rows (texts decoded together)")


def _spread(cell: SweepCell) -> tuple[float, float, float]:
    ratios = cell.speedup
    return (ratios.median, ratios.least, ratios.most) if ratios is not None else (1.0, 1.0, 1.0)


def _name(cell: SweepCell) -> str:
    return f"{cell.drafter} K={cell.k}"
