"""Survival of chains of every length, from what any of them accepted: each takes steps of its own through a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from jaxspec.serve.survival import Survival


class Walks:
    """Survival by length; what one length accepted is replayed with the steps of others.

    Texts have easy stretches and hard ones. Short drafts take several steps through an easy stretch, long ones leave it
    with their first: so a position is accepted more often by short drafts, and what one length accepts is too much for
    longer ones and too little for shorter ones. But a run of right drafts, up to the first wrong one, says what every
    length would have accepted, for all of them begin anew behind a wrong draft: exactly with a draft model, nearly with
    lookup, which may find another match from an accepted draft on.

    The token behind a verification that accepted everything is the target's own. Whether it would have been drafted is
    not known, and drawn by chance as often as the last position is accepted.

    Attributes:
      counts: survival of drafts of 0, 1, ... tokens; that of the longest may have more positions.
    """

    def __init__(self, longest: int, positions: int, memory: float, from_tokens: bool):
        """Of nothing yet.

        Args:
          longest: of the chains.
          positions: of the longest, for trees that are deeper.
          memory: verifications that are remembered.
          from_tokens: whether drafts depend on the tokens before them and on nothing else. Others, of heads, get worse
            with each that they go on from, and are better behind a new step: what shorter ones would have accepted is
            then not known, and taken to be what was accepted.
        """
        self.counts = [*(Survival(length, memory) for length in range(longest)), Survival(positions, memory)]
        self._from_tokens, self._random = from_tokens, Random(0)

    def add(self, length: int, accepted: Sequence[int]) -> None:
        """Counts verifications that follow each other, of ``length`` drafts each; those of longer ones up to that."""
        if not length or not accepted:
            return
        own = self.counts[length]
        since = own.add(length, accepted)
        runs, going = self._runs(length, accepted, own.rates()[length - 1][0])
        for other, counts in enumerate(self.counts[1:], start=1):
            if other > length or (other < length and self._from_tokens):
                replayed, rest = _replayed(runs, going, other)
                counts.add(min(length, other), replayed, since, rest)
            elif other < length:
                counts.add(other, accepted, since)

    def _runs(self, length: int, accepted: Sequence[int], rate: float) -> tuple[Counter[int], int]:
        """How many runs of so many right drafts end with a wrong one, and right drafts behind the last wrong one."""
        found, going = Counter[int](), 0
        for count in accepted[:-1]:
            going += count
            if count == length and self._random.random() < rate:
                going += 1
            else:
                found[going] += 1
                going = 0
        going += accepted[-1]
        if accepted[-1] == length:
            return found, going
        found[going] += 1
        return found, 0


def _replayed(runs: Mapping[int, int], going: int, length: int) -> tuple[Counter[int], int]:
    """What drafts of a length would have accepted; and how many so far of a last one whose end is not known."""
    found = Counter[int]()
    for run, times in runs.items():
        full, rest = divmod(run, length + 1)
        found[length] += full * times
        found[rest] += times
    full = (going + 1) // (length + 1)
    found[length] += full
    return found, max(going - full * (length + 1), 0)
