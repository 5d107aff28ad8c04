"""How long the steps of one arm take: a running mean, and a line through the experts that they should touch."""

import math
from dataclasses import dataclass

SEEN_FOR_SLOPE = 12  # dispatches before a line through times and touched experts is trusted


@dataclass
class ArmTime:
    """Running mean and variance of the time of a step, in seconds, forgetting old dispatches.

    Attributes:
      mean_s, square, count: of the times.
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

    def add(self, step_s: float, memory: float) -> None:
        """Notes the mean step of a dispatch."""
        self.count = min(self.count + 1.0, memory)
        share = 1.0 / self.count
        self.last_s, delta = step_s, step_s - self.mean_s
        self.mean_s += share * delta
        self.square += share * (delta * delta * (1 - share) - self.square)
        if self.count > 1:
            self.error = math.sqrt(self.square / self.count) / self.mean_s

    def touching(self, experts: float, memory: float) -> None:
        """Notes how many experts the step that was added last had been predicted to touch."""
        share = 1.0 / min(self.count, memory)
        delta = experts - self.experts
        self.experts += share * delta
        self.spread += share * (delta * delta * (1 - share) - self.spread)
        self.together += share * (delta * (self.last_s - self.mean_s) - self.together)

    def with_experts(self, experts: float) -> float:
        """Time of a step that touches so many experts, by the line through what was seen; never less than half."""
        if self.count < SEEN_FOR_SLOPE or self.spread <= 0 or self.together <= 0:
            return self.mean_s
        return max(self.mean_s + self.together / self.spread * (experts - self.experts), 0.5 * self.mean_s)
