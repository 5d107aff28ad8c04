"""How often drafted positions are accepted: running counts with what they say about the tokens of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np

PRIOR = 8.0  # verifications of all that stand in for the missing own ones of a part


@dataclass
class Survival:
    """Counts of tried and accepted drafts by position, older ones fading out.

    ``s_j``, the survival of position j, is the share of verifications that accept at least j drafts (no independence
    between positions is assumed; ``speculation.md`` calls the sum E[tau] = 1 + sum s_j). A position of a tree is a
    depth.

    Attributes:
      length: positions that are counted.
      memory: verifications that are remembered.
      limit: positions that may be accepted at all, None for all.
    """

    length: int
    memory: float = 400.0
    limit: int | None = None
    _tried: list[float] = field(init=False)
    _hits: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._tried = [0.0] * self.length
        self._hits = [0.0] * self.length

    def add(self, length: int, accepted: Sequence[int]) -> None:
        """Counts verifications of ``length`` drafts each."""
        new = len(accepted)
        if not new or not length:
            return
        counts = Counter(accepted)
        above = new - counts[0]
        for place in range(min(length, self.length)):
            fade = max(0.0, 1.0 - max(0.0, self._tried[place] + new - self.memory) / max(self._tried[place], 1.0))
            self._tried[place] = self._tried[place] * fade + new
            self._hits[place] = self._hits[place] * fade + above
            above -= counts[place + 1]

    def by_position(self, beside: Survival | None = None) -> list[tuple[float, float]]:
        """Survival of each position and its standard error.

        Positions that were never tried are taken to follow the last one's rate, with an error as big as themselves.

        Args:
          beside: counts of at least as many positions, which weigh as much as ``PRIOR`` verifications.
        """
        found, last, rate = [], 1.0, 0.5
        others = repeat((0.0, 0.0)) if beside is None else zip(beside._tried, beside._hits, strict=True)
        for tried, hits, (more, good) in zip(self._tried, self._hits, others, strict=False):
            if more:
                tried, hits = tried + PRIOR, hits + PRIOR * good / more
            if tried:
                now = hits / tried
                now = now if now < last else last
                rate = now / last if last > 0 else 0.0
                smoothed = (hits + 0.5) / (tried + 1.0)
                error = math.sqrt(smoothed * (1 - smoothed) / tried)
            else:
                error = now = last * rate
            found.append((now, error))
            last = now
        return found


def mean_survival(requests: Sequence[Survival], everyone: Sequence[float]) -> list[float]:
    """Survival of each position, the mean over these requests.

    What a request has not tried yet it shares with everyone, who weigh as much as ``PRIOR`` verifications of it; what
    lies beyond its limit survives never.
    """
    count, depth = len(requests), len(everyone)
    numbers = chain.from_iterable(numbers for r in requests for numbers in (r._tried, r._hits))
    seen_RXK = np.fromiter(numbers, float, 2 * count * depth).reshape(count, 2, depth)
    own_RK = (seen_RXK[:, 1] + PRIOR * np.asarray(everyone)) / (seen_RXK[:, 0] + PRIOR)
    np.minimum.accumulate(own_RK, axis=1, out=own_RK)
    for row, request in enumerate(requests):
        if request.limit is not None:
            own_RK[row, request.limit :] = 0.0
    return [total / count for total in np.add.reduce(own_RK, axis=0).tolist()]
