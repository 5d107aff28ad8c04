"""Pictures of runs: losses, accuracy by draft, and held-out acceptance over the updates."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.train.run_log import Entry, read_metrics
from jaxspec.whole_file import write_whole

KINDS = (".png", ".svg", ".pdf")
NEIGHBORS = 20  # the mean reaches over a twentieth of all entries to both sides
DASHES = ("-", "--", "-.", ":")
Wanted = Callable[[str], bool]


def plot_runs(runs: Sequence[Path], file: Path) -> None:
    """Draws runs into one PNG, SVG or PDF: a figure has a color, a run a line style.

    Raises:
      ConfigError: matplotlib is not installed, a run has no log, or the file cannot be a picture.
    """
    entries = {run.resolve().name: read_metrics(run) for run in runs}
    if file.suffix not in KINDS or not file.parent.is_dir():
        raise ConfigError(f"plot: {file} must end in {', '.join(KINDS)} and lie in a directory that is there")
    if len(entries) < len(runs):
        raise ConfigError(f"plot: runs must have different names, got {', '.join(map(str, runs))}")
    if empty := [name for name, logged in entries.items() if not logged]:
        raise ConfigError(f"plot: nothing is logged yet in {', '.join(empty)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; pip install 'jaxspec[plots]'") from None
    figure = Figure(figsize=(16, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, acceptance = figure.subplots(1, 3)
    _draw(loss, entries, lambda name: name == "loss" or name.endswith("_loss"), smooth=True)
    loss.set(title="training loss", ylabel="loss (nats per token where it is a cross-entropy)")
    _draw(accuracy, entries, lambda name: name.startswith("accuracy_"), smooth=True)
    accuracy.set(title="drafts equal to the target's best token", ylabel="share of positions", ylim=(0, 1))
    _draw(acceptance, entries, lambda name: name.endswith("/acceptance_length"), smooth=False)
    acceptance.set(title="held-out acceptance length", ylabel="tokens per target pass")
    for axes in (loss, accuracy, acceptance):
        if axes.get_lines():
            axes.grid(alpha=0.3)
            axes.set_xlabel("update")
            _legend(axes, list(entries))
        else:
            axes.set_axis_off()
            axes.set_title(f"nothing logged: {axes.get_title()}")
    figure.supxlabel("faint: as logged; strong: mean over neighboring entries, as many before as after", fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format=file.suffix[1:])
    write_whole(file, picture.getvalue())


def series(entries: Sequence[Entry], wanted: Wanted) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the updates and values of every figure that is wanted."""
    by_name: dict[str, tuple[list[float], list[float]]] = {}
    for entry in entries:
        for name, value in entry.items():
            if wanted(name):
                steps, values = by_name.setdefault(name, ([], []))
                steps.append(entry["step"])
                values.append(value)
    return by_name


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the mean over neighbors, as many before as after: it does not lag, and is wider away from both ends."""
    widest = len(values) // NEIGHBORS
    means = []
    for i in range(len(values)):
        reach = min(widest, i, len(values) - 1 - i)
        means.append(sum(values[i - reach : i + reach + 1]) / (2 * reach + 1))
    return means


def _draw(axes: Any, entries: dict[str, list[Entry]], wanted: Wanted, *, smooth: bool) -> None:
    names = sorted({name for logged in entries.values() for name in series(logged, wanted)})
    for run, logged in enumerate(entries.values()):
        for name, (steps, values) in series(logged, wanted).items():
            style = {"color": f"C{names.index(name) % 10}", "linestyle": DASHES[run % len(DASHES)]}
            shown = smoothed(values) if smooth else values
            axes.plot(steps, shown, marker=None if smooth else "o", markersize=3, label=name, **style)
            if smooth:
                axes.plot(steps, values, alpha=0.2, linewidth=0.8, color=style["color"])


def _legend(axes: Any, runs: Sequence[str]) -> None:
    """Draws it below the panel: a color for each figure, and for several runs a line style for each."""
    from matplotlib.lines import Line2D

    lines = {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    keys = [(Line2D([], [], color=line.get_color()), words_of(name)) for name, line in lines.items()]
    if len(runs) > 1:
        keys += [(Line2D([], [], color="0.3", linestyle=DASHES[i % len(DASHES)]), run) for i, run in enumerate(runs)]
    handles, labels = zip(*keys, strict=True)
    axes.legend(handles, labels, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)


def words_of(name: str) -> str:
    """Returns a logged figure in words: ``accuracy_0`` is draft 1."""
    if name.startswith("accuracy_"):
        return f"draft {int(name.removeprefix('accuracy_')) + 1}"
    return name.removesuffix("/acceptance_length")
