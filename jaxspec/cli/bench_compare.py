"""``jaxspec bench compare``: two reports of ``jaxspec bench``, cell by cell."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from jaxspec.cli.screen import Screen


@dataclass(frozen=True)
class CompareArgs:
    """Compares two reports: medians, and the ratio with what the rounds of both allow.

    Attributes:
      before: bench.json of the older run.
      after: bench.json of the newer run.
      check: Exit with status 1 if a figure is worse beyond the noise: every round after is below every round before.
      tolerance: Share by which it may be slower on top of that.
      color: Color on a terminal; the environment's NO_COLOR switches it off too.
    """

    before: tyro.conf.Positional[Path]
    after: tyro.conf.Positional[Path]
    check: bool = False
    tolerance: float = 0.0
    color: bool = True


def run(args: CompareArgs) -> int:
    """Prints the table; returns the exit status."""
    from jaxspec.bench.record import load
    from jaxspec.bench.regressions import compare_reports
    from jaxspec.bench.tables import SYNTHETIC

    before = load(args.before)
    comparison = compare_reports(before, load(args.after), args.tolerance)
    screen = Screen(color=args.color)
    for warning in comparison.warnings:
        sys.stderr.write(f"jaxspec: {warning}\n")
    if before.synthetic is not None:
        screen.line(f"{SYNTHETIC}: {before.synthetic}", "bold")
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name in ("cell", "figure", "before", "after", "ratio", ""):
        table.add_column(name)
    for c in comparison.changes:
        digits = 2 if max(c.before, c.after) < 100 else 0
        ratio = f"{c.ratio.median:.2f}x ({c.ratio.least:.2f} to {c.ratio.most:.2f})"
        verdict = "WORSE" if c.worse else ""
        style = "bold red" if c.worse else ""
        table.add_row(c.cell, c.figure, f"{c.before:.{digits}f}", f"{c.after:.{digits}f}", ratio, verdict, style=style)
    screen.console.width = max(screen.console.width, 160) if not screen.live else screen.console.width
    screen.console.print(table)
    for name, cells in (("first", comparison.only_before), ("second", comparison.only_after)):
        if cells:
            screen.line(f"only in the {name} report: {'; '.join(cells)}")
    worse = sum(change.worse for change in comparison.changes)
    screen.line(f"{worse} of {len(comparison.changes)} figures are worse beyond the noise", "bold" if worse else "")
    return 1 if worse and args.check else 0
