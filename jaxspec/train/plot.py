"""Pictures of runs: losses, accuracy by draft, and held-out acceptance over the updates."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.train.metrics import Entry, read_metrics

KINDS = (".png", ".svg", ".pdf")
SMOOTHED = 0.9
Wanted = Callable[[str], bool]


def plot_runs(runs: Sequence[Path], file: Path) -> None:
    """Draws runs into one file, side by side where they logged the same figures.

    Args:
      runs: directories with ``metrics.jsonl``.
      file: PNG, SVG or PDF.

    Raises:
      ConfigError: matplotlib is not installed, a run has no log, or the file cannot be a picture.
    """
    entries = {run.resolve().name: read_metrics(run) for run in runs}
    if file.suffix not in KINDS or not file.parent.is_dir():
        raise ConfigError(f"plot: {file} must end in {', '.join(KINDS)} and lie in a directory that is there")
    if len(entries) < len(runs):
        raise ConfigError(f"plot: runs must have different names, got {', '.join(map(str, runs))}")
    if empty := [name for name, found in entries.items() if not found]:
        raise ConfigError(f"plot: nothing is logged yet in {', '.join(empty)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; pip install 'jaxspec[plots]'") from None
    figure = Figure(figsize=(16, 5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, acceptance = figure.subplots(1, 3)
    _draw(loss, entries, lambda name: name == "loss" or name.endswith("_loss"), smooth=True)
    loss.set(title="training loss", xlabel="update")
    _draw(accuracy, entries, lambda name: name.startswith("accuracy_"), smooth=True)
    accuracy.set(title="drafts equal to the target's best token", xlabel="update", ylim=(0, 1))
    _draw(acceptance, entries, lambda name: name.endswith("/acceptance_length"), smooth=False)
    acceptance.set(title="held-out acceptance length", xlabel="update")
    for axes in (loss, accuracy, acceptance):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7)
        else:
            axes.set_axis_off()
    figure.savefig(file, dpi=120)


def series(entries: Sequence[Entry], wanted: Wanted) -> dict[str, tuple[list[float], list[float]]]:
    """Updates and values of every figure that is wanted."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for entry in entries:
        for name, value in entry.items():
            if wanted(name):
                steps, values = found.setdefault(name, ([], []))
                steps.append(entry["step"])
                values.append(value)
    return found


def smoothed(values: Sequence[float]) -> list[float]:
    """Running mean that forgets exponentially, without a bias towards the beginning (Kingma 2015, section 3)."""
    total = weight = 0.0
    found = []
    for value in values:
        total, weight = SMOOTHED * total + (1 - SMOOTHED) * value, SMOOTHED * weight + 1 - SMOOTHED
        found.append(total / weight)
    return found


def _draw(axes: Any, entries: dict[str, list[Entry]], wanted: Wanted, *, smooth: bool) -> None:
    for run, found in entries.items():
        for name, (steps, values) in sorted(series(found, wanted).items()):
            label = f"{run}: {name}" if len(entries) > 1 else name
            if not smooth:
                axes.plot(steps, values, marker="o", markersize=3, label=label)
                continue
            (line,) = axes.plot(steps, smoothed(values), label=label)
            axes.plot(steps, values, color=line.get_color(), alpha=0.2, linewidth=0.8)
