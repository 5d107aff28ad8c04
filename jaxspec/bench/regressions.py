"""Two reports of the same sweep side by side: ratios per cell, and which of them are worse beyond the noise."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxspec.bench.record import BenchReport, Spread, SweepCell
from jaxspec.errors import ConfigError

SPEEDUP = "speed-up"


@dataclass(frozen=True)
class Change:
    """One figure of one cell in both reports.

    Attributes:
      cell: in words.
      figure: which; more is better in all of them.
      before, after: medians.
      ratio: after over before: of the medians, and the least and greatest that the rounds of both allow.
      worse: whether every round after is below every round before, by more than the tolerance.
    """

    cell: str
    figure: str
    before: float
    after: float
    ratio: Spread
    worse: bool


@dataclass(frozen=True)
class ReportComparison:
    """Two reports.

    Attributes:
      changes: of the cells that both have.
      only_before, only_after: cells of one of them.
      warnings: what makes them hard to compare.
    """

    changes: list[Change]
    only_before: list[str]
    only_after: list[str]
    warnings: list[str]


def compare_reports(before: BenchReport, after: BenchReport, tolerance: float = 0.0) -> ReportComparison:
    """Compares reports cell by cell.

    Args:
      before: the older.
      after: the newer.
      tolerance: share by which the newer may be slower on top of the noise.

    Raises:
      ConfigError: one of them has synthetic acceptance and the other has not or another, they have no cell in common,
        or the tolerance is no share.
    """
    if not 0 <= tolerance < 1:
        raise ConfigError(f"compare: the tolerance is a share from 0 to below 1, got {tolerance}")
    if before.synthetic != after.synthetic:
        raise ConfigError(
            f"compare: synthetic acceptance is {before.synthetic} in the first report and {after.synthetic} in the "
            "second; speeds at different acceptance say nothing about the engine"
        )
    old, new = ({cell.key: cell for cell in report.cells} for report in (before, after))
    common = [key for key in old if key in new]
    if not common:
        raise ConfigError("compare: the reports have no cell in common; run the same sweep twice")
    return ReportComparison(
        changes=[change for key in common for change in _changes(old[key], new[key], tolerance)],
        only_before=[cell.name for key, cell in old.items() if key not in new],
        only_after=[cell.name for key, cell in new.items() if key not in old],
        warnings=list(_warnings(before, after)),
    )


def _changes(old: SweepCell, new: SweepCell, tolerance: float) -> Iterable[Change]:
    after = _measured(new)
    for figure, was in _measured(old).items():
        if figure in after:
            now = after[figure]
            ratio = Spread(now.median / was.median, now.least / was.most, now.most / was.least)
            # A speed-up is a ratio within one run; other figures drift with the machine as well.
            worse = now.most < was.least * (1 - tolerance)
            yield Change(old.name, figure, was.median, now.median, ratio, worse)


def _measured(cell: SweepCell) -> dict[str, Spread]:
    figures: Mapping[str, Spread | None] = {
        "plain tokens/s": cell.plain.decode_tokens_per_s or cell.plain.tokens_per_s,
        "tokens/s": cell.speculative and (cell.speculative.decode_tokens_per_s or cell.speculative.tokens_per_s),
        SPEEDUP: cell.speedup,
    }
    return {name: spread for name, spread in figures.items() if spread is not None}


def _warnings(before: BenchReport, after: BenchReport) -> Iterable[str]:
    for what in ("machine", "versions", "model", "seed"):
        a, b = getattr(before, what), getattr(after, what)
        if a != b:
            keys = sorted(k for k in {*a, *b} if a.get(k) != b.get(k)) if isinstance(a, dict) else []
            yield f"{what} differs" + "".join(f"; {key}: {a.get(key)} and {b.get(key)}" for key in keys)
    for name, report in (("first", before), ("second", after)):
        if not report.complete:
            yield f"the {name} sweep did not come to its end"
