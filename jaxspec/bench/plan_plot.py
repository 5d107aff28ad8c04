"""The picture of a plan: speed-up against batch size, target efficiency, experts touched."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from jaxspec.perf.plan import BatchPlan, Question

KINDS = (".png", ".svg", ".pdf")
LENGTHS = (1, 2, 3, 5, 7)


def plot_plan(question: "Question", plans: Sequence["BatchPlan"], file: Path, *, title: str) -> None:
    """Draws a plan into a file.

    Raises:
      ConfigError: matplotlib is not installed, or the file cannot be a picture.
    """
    if file.suffix not in KINDS or not file.parent.is_dir():
        raise ConfigError(f"plot: {file} must end in {', '.join(KINDS)} and lie in a directory that is there")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot: matplotlib is not installed; pip install 'jaxspec[plots]'") from None
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    speed, efficiency, experts = figure.subplots(1, 3)
    _speed(speed, plans)
    _efficiency(efficiency, question, plans)
    _experts(experts, question, plans)
    for axes in (speed, efficiency, experts):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("rows decoded together")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def _speed(axes: Any, plans: Sequence["BatchPlan"]) -> None:
    """The best option with its error bar, and chains of its drafter."""
    rows = [p.rows for p in plans]
    for place, length in enumerate(o.length for o in plans[0].chains):
        if length in LENGTHS:
            axes.plot(rows, [p.chains[place].speedup for p in plans], lw=1, label=f"K = {length}")
    axes.plot(rows, [p.best.speedup for p in plans], "k", lw=2, label="best")
    axes.fill_between(rows, [p.best.low for p in plans], [p.best.high for p in plans], color="k", alpha=0.12)
    axes.axhline(1, color="k", ls=":", lw=1)
    axes.set_ylabel("speed-up over plain decoding")


def _efficiency(axes: Any, question: "Question", plans: Sequence["BatchPlan"]) -> None:
    """T(B, 1) / T(B, K + 1), without drafting."""
    machine, rows = question.machines[0], [p.rows for p in plans]
    for length in (k for k in question.lengths if k in LENGTHS):
        verify = [machine.verify_s(b, length + 1, question.context) for b in rows]
        axes.plot(rows, [p.plain_s / v for p, v in zip(plans, verify, strict=True)], lw=1, label=f"K = {length}")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("target efficiency")


def _experts(axes: Any, question: "Question", plans: Sequence["BatchPlan"]) -> None:
    """Distinct experts of a layer; a dense layer is one."""
    rows, routed = [p.rows for p in plans], question.model.routed
    for length in (0, *(k for k in question.lengths if k in LENGTHS)):
        found = [question.machines[0].touched(b, length + 1) if routed else 1 for b in rows]
        axes.plot(rows, found, lw=1, label=f"K = {length}" if length else "plain")
    axes.set_ylabel(f"experts touched of {routed.experts if routed else 1}")
