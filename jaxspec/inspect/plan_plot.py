"""The picture of a plan: speed-up against batch size, target efficiency, experts touched."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.errors import ConfigError
from jaxspec.whole_file import write_whole

if TYPE_CHECKING:
    from jaxspec.perf.planner import BatchPlan, Question

BEST, RANGE = "best chain or tree", "range of the best"
KINDS = (".png", ".svg", ".pdf")
# One color per speculation length in all panels: from yellow to violet as K grows; plain decoding is gray.
COLORS = {0: "0.55", 1: "#f0a202", 2: "#e4572e", 3: "#b5179e", 5: "#7209b7", 7: "#3a0ca3"}


def plot_plan(question: "Question", plans: Sequence["BatchPlan"], file: Path, *, title: str) -> None:
    """Draws a plan into a file.

    Raises:
      ConfigError: matplotlib is not installed, or the file cannot be a picture.
    """
    check_picture(file)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; pip install 'jaxspec[plots]'") from None
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}, {question.context} tokens in the cache of each row")
    speed, efficiency, experts = figure.subplots(1, 3)
    _speed(speed, plans)
    _efficiency(efficiency, question, plans)
    _experts(experts, question, plans)
    lines: dict[str, Any] = {}
    for axes in (speed, efficiency, experts):
        axes.set_xscale("log", base=2)
        axes.set_xticks([p.rows for p in plans], labels=[str(p.rows) for p in plans], minor=False)
        axes.set_xlabel("rows (texts decoded together)")
        axes.grid(alpha=0.3)
        lines |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = sorted(lines, key=lambda name: name in (BEST, RANGE))
    location: Any = "outside lower center"
    figure.legend([lines[name] for name in names], names, loc=location, ncols=len(names), frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format=file.suffix[1:])
    write_whole(file, picture.getvalue())


def check_picture(file: Path) -> None:
    """Refuses what cannot be a picture, or lies nowhere.

    Raises:
      ConfigError: it is such a file.
    """
    if file.suffix not in KINDS:
        raise ConfigError(f"plot: a picture ends in {', '.join(KINDS)}, got {file}")
    if not file.parent.is_dir():
        raise ConfigError(f"plot: there is no directory {file.parent} for {file.name}; make it first")


def _line(axes: Any, rows: Sequence[int], values: Sequence[float], length: int) -> None:
    label = f"K = {length}" if length else "plain decoding"
    axes.plot(rows, values, color=COLORS[length], lw=1.5, marker=".", label=label)


def _speed(axes: Any, plans: Sequence["BatchPlan"]) -> None:
    """Draws the best option with its error band, and chains of its drafter."""
    rows = [p.rows for p in plans]
    low, high = [p.best.low for p in plans], [p.best.high for p in plans]
    axes.fill_between(rows, low, high, color="k", alpha=0.1, lw=0, label=RANGE)
    _line(axes, rows, [1.0] * len(rows), 0)
    for i, length in enumerate(o.length for o in plans[0].chains):
        if length in COLORS:
            _line(axes, rows, [p.chains[i].speedup for p in plans], length)
    axes.plot(rows, [p.best.speedup for p in plans], "k--", lw=2, label=BEST)
    kinds = {o.kind for p in plans for o in p.chains}
    chains = f", chains of {kinds.pop()}" if len(kinds) == 1 else ""
    axes.set(title=f"speed-up over plain decoding{chains}", ylabel="tokens/s over plain tokens/s", ylim=(0, None))


def _efficiency(axes: Any, question: "Question", plans: Sequence["BatchPlan"]) -> None:
    """Draws T(B, 1) / T(B, K + 1), without drafting."""
    machine, rows = question.machines[0], [p.rows for p in plans]
    _line(axes, rows, [1.0] * len(rows), 0)
    for length in (k for k in question.lengths if k in COLORS):
        verify = [machine.verify_s(b, length + 1, question.context) for b in rows]
        _line(axes, rows, [p.plain_s / v for p, v in zip(plans, verify, strict=True)], length)
    axes.set(title="target efficiency", ylabel="plain step time over time to verify K drafts", ylim=(0, 1.05))


def _experts(axes: Any, question: "Question", plans: Sequence["BatchPlan"]) -> None:
    """Draws distinct experts of a layer; a dense layer is one."""
    rows, routed = [p.rows for p in plans], question.model.routed
    for length in (0, *(k for k in question.lengths if k in COLORS)):
        _line(axes, rows, [question.machines[0].touched(b, length + 1) if routed else 1 for b in rows], length)
    most = routed.experts if routed else 1
    axes.set(title="experts that a step reads", ylabel=f"distinct experts per layer, of {most}", ylim=(0, 1.05 * most))
