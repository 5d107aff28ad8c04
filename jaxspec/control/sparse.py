"""When to verify drafts that n of B rows have: if ``n / B * (tokens - 1) > ratio - 1``.

For drafters that often find nothing: a verification takes its time for all rows, and brings tokens to those that have
a draft.
"""

from collections.abc import Sequence
from typing import NamedTuple

BINS = 8  # of the share of rows that have a draft


class Share(NamedTuple):
    """Which steps verify drafts.

    Attributes:
      above: share of rows that must be exceeded by those that have a draft.
      steps: share of all steps that then verify.
      rows: share of rows that have a draft, mean over those steps.
    """

    above: float = 0.0
    steps: float = 1.0
    rows: float = 1.0

    def min_rows(self, rows: int) -> int:
        """Returns how many rows must have a draft, of so many."""
        return int(self.above * rows) + 1


class DraftAvailability:
    """Counts steps by the share of rows that had a draft, for each batch size; older ones fade out."""

    def __init__(self, memory: float):
        """Knows nothing; ``memory`` is the steps that are remembered."""
        self._memory = memory
        self._counts: dict[int, tuple[list[float], list[float]]] = {}

    def record(self, size: int, rows: int, with_drafts: Sequence[int]) -> None:
        """Counts how many of the rows had a draft, in each step of a dispatch at a batch size (``bucket``)."""
        if not with_drafts:
            return
        steps, shares = self._counts.setdefault(size, ([0.0] * (BINS + 1), [0.0] * (BINS + 1)))
        fade = min(1.0, max(0.0, self._memory - len(with_drafts)) / max(sum(steps), 1.0))
        steps[:], shares[:] = [x * fade for x in steps], [x * fade for x in shares]
        for count in with_drafts:
            at = -(-count * BINS // rows)
            steps[at] += 1.0
            shares[at] += count / rows

    def best(self, size: int, drafts: float, added: float) -> Share:
        """Returns the steps that should verify; all of them if none should, or nothing is known of this batch size.

        A verification has so many drafts accepted of a row that has some, and adds so many plain steps' time.
        """
        if size not in self._counts:
            return Share()
        steps, shares = self._counts[size]
        means = [
            share / count if count else at / BINS for at, (count, share) in enumerate(zip(steps, shares, strict=True))
        ]
        first = next((at for at in range(1, BINS + 1) if means[at] * drafts > added), 1)
        verified = sum(steps[first:])
        rows = sum(shares[first:]) / verified if verified else 1.0
        return Share((first - 1) / BINS, verified / sum(steps), rows)
