"""How many rows have drafts, with drafters that often find none; and from how many of them on verifying them pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BINS = 8  # of the share of rows that have a draft


class Verified(NamedTuple):
    """Which steps verify drafts.

    Attributes:
      above: share of rows that must be exceeded by those that have a draft.
      share: of all steps that then verify.
      density: share of rows that have a draft, mean over those steps.
    """

    above: float
    share: float
    density: float

    def least(self, rows: int) -> int:
        """Rows that must have a draft, of so many."""
        return int(self.above * rows) + 1


ALL = Verified(0.0, 1.0, 1.0)


@dataclass
class FoundDrafts:
    """Counts of steps by the share of rows that had a draft, older ones fading out, by number of rows.

    Attributes:
      memory: steps that are remembered.
    """

    memory: float
    _steps: dict[int, list[float]] = field(default_factory=dict, init=False)
    _rows: dict[int, list[float]] = field(default_factory=dict, init=False)

    def add(self, size: int, rows: int, found: Sequence[int]) -> None:
        """Notes how many of so many rows had a draft, in each step."""
        if not found:
            return
        steps = self._steps.setdefault(size, [0.0] * (BINS + 1))
        shares = self._rows.setdefault(size, [0.0] * (BINS + 1))
        fade = max(0.0, 1.0 - max(0.0, sum(steps) + len(found) - self.memory) / max(sum(steps), 1.0))
        steps[:], shares[:] = [x * fade for x in steps], [x * fade for x in shares]
        for count in found:
            place = -(-count * BINS // rows)
            steps[place] += 1.0
            shares[place] += count / rows

    def pays(self, size: int, tokens: float, time: float) -> Verified:
        """Which steps should verify so that most tokens come per second; all, if none should.

        A verification adds tokens where a row has a draft, and its time whatever the rows have.

        Args:
          size: of the rows.
          tokens: that a verification adds to a row that has a draft.
          time: that it adds to a step, in plain steps.
        """
        steps, shares = self._steps.get(size), self._rows.get(size)
        if steps is None or shares is None:
            return ALL
        first = 1
        for place in range(1, BINS + 1):
            share = shares[place] / steps[place] if steps[place] else place / BINS
            if share * tokens > time:
                first = place
                break
        some, total = sum(steps[first:]), sum(steps)
        return Verified((first - 1) / BINS, some / total, sum(shares[first:]) / some if some else 1.0)
