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

    Lookup finds something in the same parts of a text, however many tokens it drafts; but of those parts long drafts
    leave fewer places to look from. So the odds that a row has a draft go down as the tokens of a step that has one
    go up, and what one length found tells what another one would: over recorded texts to 3 %
    (``tests/unit/serve/test_replay.py``).

    Attributes:
      memory: steps that are remembered.
    """

    memory: float
    _steps: dict[int, list[float]] = field(default_factory=dict, init=False)
    _rows: dict[int, list[float]] = field(default_factory=dict, init=False)
    _verified: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)

    def add(self, size: int, rows: int, found: Sequence[int], tokens: float = 0.0, least: int = 1) -> None:
        """Notes how many rows had a draft, in each step.

        Args:
          size: of the rows.
          rows: active.
          found: of them, had a draft.
          tokens: that a verification adds to a row that has a draft, with what was drafted.
          least: rows that had to have one for it.
        """
        if not found:
            return
        steps = self._steps.setdefault(size, [0.0] * (BINS + 1))
        shares = self._rows.setdefault(size, [0.0] * (BINS + 1))
        fade = max(0.0, 1.0 - max(0.0, sum(steps) + len(found) - self.memory) / max(sum(steps), 1.0))
        steps[:], shares[:] = [x * fade for x in steps], [x * fade for x in shares]
        verified = sum(count for count in found if count >= least) / rows
        before, added = self._verified.get(size, (0.0, 0.0))
        self._verified[size] = before * fade + verified, added * fade + verified * tokens
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
        if size not in self._steps:
            return ALL
        steps, shares = self._steps[size], self._rows[size]
        first = 1
        for place in range(1, BINS + 1):
            share = shares[place] / steps[place] if steps[place] else place / BINS
            if share * tokens > time:
                first = place
                break
        total = sum(steps)
        some, share = sum(steps[first:]) / total, sum(shares[first:]) / total
        if not some:
            return Verified((first - 1) / BINS, 0.0, 1.0)
        density, more = share / some, self._more(size, tokens)
        spread = sum(x * x / n for n, x in zip(steps[first:], shares[first:], strict=True) if n) / total / share
        usual = sum(shares) / total
        # Of what more is found in a step, some lets other steps verify, as far as counts differ from step to step.
        others = (density - usual) / (spread - usual) if spread > usual else 0.0
        return Verified((first - 1) / BINS, min(1.0, some * more**others), min(1.0, density * more ** (1.0 - others)))

    def _more(self, size: int, tokens: float) -> float:
        """How many rows would have a draft, over those that had, if verifications added other tokens to them."""
        found, verified, added = sum(self._rows[size]), *self._verified[size]
        if not verified:
            return 1.0
        part, share = verified / found, found / sum(self._steps[size])
        odds = (1.0 + part * added / verified) / (1.0 + part * tokens)
        return odds / (1.0 + share * (odds - 1.0))
