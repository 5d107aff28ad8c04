"""How long the steps of one arm take: a running mean, and a line through the experts that they should touch."""

import math
from dataclasses import dataclass, field
from statistics import median

SEEN_TO_TRUST = 4  # dispatches before what was measured while serving replaces a calibration
SEEN_FOR_SLOPE = 12  # dispatches before a line through times and touched experts is trusted
MEDIAN_OF = 8  # dispatches, the first ones
MOST_APART = 1.25  # times what is usual: a dispatch that took longer, or was shorter by that, counts as just so long


@dataclass
class ArmTime:
    """Running mean and variance of the time of a step, in seconds, forgetting old dispatches.

    Dispatches weigh by their steps, for short ones spend much of their time on the way to the device and back. A time
    far from the mean, at first from the median, is moved towards it: other programs take the machine away for a moment
    now and then.

    Attributes:
      mean_s, square, count: of the times; the count is of dispatches of full length.
      error: relative standard error of the mean; a single measurement may be off by half.
      last_s: the latest of them.
      experts, spread, together: mean and variance of the experts that steps were predicted to touch, and covariance
        with their times.
    """

    mean_s: float = 0.0
    square: float = 0.0
    count: float = 0.0
    error: float = 0.5
    last_s: float = 0.0
    experts: float = 0.0
    spread: float = 0.0
    together: float = 0.0
    _first: list[tuple[float, float]] = field(default_factory=list)

    @property
    def trusted(self) -> bool:
        """Whether it was run often enough to be believed."""
        return self.count >= SEEN_TO_TRUST

    def add(self, step_s: float, memory: float, weight: float = 1.0, usual_s: float | None = None) -> None:
        """Notes the mean step of a dispatch; ``weight`` is 1 for one of full length.

        Args:
          step_s: measured.
          memory: dispatches that are remembered.
          weight: share of a full dispatch.
          usual_s: what was expected of this one; the mean unless something else is known.
        """
        if len(self._first) < MEDIAN_OF:
            self._first.append((step_s, weight))
            middle, again = median(time_s for time_s, _ in self._first), self._first
            self.mean_s = self.square = self.count = 0.0
        else:
            middle, again = usual_s or self.mean_s, [(step_s, weight)]
        for time_s, part in again:
            self._add(min(max(time_s, middle / MOST_APART), middle * MOST_APART), memory, part)
        if self.count > 1:
            self.error = math.sqrt(self.square / self.count) / self.mean_s

    def _add(self, step_s: float, memory: float, weight: float) -> None:
        self.count = min(self.count + weight, memory)
        share = weight / self.count
        self.last_s, delta = step_s, step_s - self.mean_s
        self.mean_s += share * delta
        self.square += share * (delta * delta * (1 - share) - self.square)

    def touching(self, experts: float, memory: float) -> None:
        """Notes how many experts the step that was added last had been predicted to touch."""
        share = 1.0 / max(min(self.count, memory), 1.0)
        delta = experts - self.experts
        self.experts += share * delta
        self.spread += share * (delta * delta * (1 - share) - self.spread)
        self.together += share * (delta * (self.last_s - self.mean_s) - self.together)

    def with_experts(self, experts: float) -> float:
        """Time of a step that touches so many experts, by the line through what was seen; never less than half."""
        if self.count < SEEN_FOR_SLOPE or self.spread <= 0 or self.together <= 0:
            return self.mean_s
        return max(self.mean_s + self.together / self.spread * (experts - self.experts), 0.5 * self.mean_s)
