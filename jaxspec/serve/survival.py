"""How often drafted positions are accepted: running counts with what they say about the tokens of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR = 8.0  # verifications of all requests that stand in for a request's missing own ones


@dataclass
class Survival:
    """Counts of tried and accepted drafts by position, older ones fading out.

    ``s_j``, the survival of position j, is the share of verifications that accept at least j drafts (no independence
    between positions is assumed; ``speculation.md`` calls the sum E[tau] = 1 + sum s_j).

    Attributes:
      length: positions that are counted.
      memory: verifications that are remembered.
    """

    length: int
    memory: float = 400.0
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
        for place in range(min(length, self.length)):
            fade = max(0.0, 1.0 - max(0.0, self._tried[place] + new - self.memory) / max(self._tried[place], 1.0))
            self._tried[place] = self._tried[place] * fade + new
            self._hits[place] = self._hits[place] * fade + sum(1 for a in accepted if a > place)

    def acceptance_length(self, length: int, beside: Survival | None = None) -> tuple[float, float]:
        """Expected tokens of a step of ``length`` drafts, the target's own token included, and their standard error.

        Positions that were never tried are taken to follow the last one's rate, with an error as big as themselves.

        Args:
          length: K.
          beside: counts of all requests, which weigh as much as ``PRIOR`` verifications.
        """
        tokens, error, last, rate = 1.0, 0.0, 1.0, 0.5
        for place in range(length):
            tried, hits = self._at(place)
            if beside is not None:
                all_tried, all_hits = beside._at(place)
                share = PRIOR * all_hits / all_tried if all_tried else 0.0
                tried, hits = tried + (PRIOR if all_tried else 0.0), hits + share
            if tried:
                now = min(hits / tried, last)
                rate = now / last if last > 0 else 0.0
                smoothed = (hits + 0.5) / (tried + 1.0)
                error += math.sqrt(smoothed * (1 - smoothed) / tried)
            else:
                now = last * rate
                error += now
            tokens += now
            last = now
        return tokens, error

    def _at(self, place: int) -> tuple[float, float]:
        return (self._tried[place], self._hits[place]) if place < self.length else (0.0, 0.0)
