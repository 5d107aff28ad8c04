"""What a head that predicts routing says of the experts that verifications touch, as the control remembers it."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class TouchedExperts:
    """Predicted experts by number of drafts; of more drafts than the last step had, by the line through what was seen.

    More drafts touch no fewer of them than the last step's did.

    Attributes:
      memory: predictions that are remembered.
      latest: experts that the first 1, 2, ... drafts of the last step were predicted to touch.
    """

    memory: float
    latest: tuple[float, ...] = ()
    _moments: list[list[float]] = field(default_factory=list)

    def add(self, touched: Sequence[float]) -> None:
        """Takes note of a step; an empty prediction leaves everything as it is."""
        if not touched:
            return
        self.latest = tuple(touched)
        for depth, experts in enumerate(touched):
            if depth == len(self._moments):
                self._moments.append([0.0] * 5)
            moments = self._moments[depth]
            moments[0] = min(moments[0] + 1, self.memory)
            share, first, own = 1 / moments[0], touched[0] - moments[1], experts - moments[2]
            moments[1] += share * first
            moments[2] += share * own
            moments[3] += share * ((1 - share) * first * first - moments[3])
            moments[4] += share * ((1 - share) * first * own - moments[4])

    def at(self, drafts: int) -> float | None:
        """Experts that the next step should touch with so many drafts, None where nothing like it was seen."""
        if drafts <= len(self.latest):
            return self.latest[drafts - 1]
        if not self.latest or drafts > len(self._moments):
            return None
        _, first, own, spread, together = self._moments[drafts - 1]
        slope = together / spread if spread > 0 else 0.0
        return max(own + slope * (self.latest[0] - first), self.latest[-1])
