"""What the steps of every arm take, beside plain ones: measured while serving, and known beforehand."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jaxspec.perf.step_ratios import StepRatios
from jaxspec.serve.arm_time import SEEN_TO_TRUST, ArmTime
from jaxspec.serve.control import Outcome
from jaxspec.serve.touched import TouchedExperts
from jaxspec.topology import AnyTopology

Known = tuple[float | None, float]  # a number and its relative error
UNKNOWN: Known = (None, math.inf)
GUESSED = 0.1  # relative error of a ratio of times taken from another length, or from half or twice the rows
ALIKE = 0.25  # relative error of what drafts add to a step, the same for all lengths, of what was known beforehand
PACE_SHARE = 0.2  # of what the latest dispatch tells of the machine's pace


@dataclass
class StepTimes:
    """Times of whole dispatches on this machine, by arm and number of rows.

    Everything counts in them: drafting, the experts that a verification touches, the host. The time of one chain tells
    about those of others; a tree's is never guessed. Where a head predicts the target's routing, a chain's time is read
    at the experts that its next verification should touch. Machines are slower at some times than at others, whatever
    they run: how the latest dispatches compare with earlier ones of their own arms is taken off.

    Attributes:
      arms: plain decoding, chains by length, then trees.
      memory: dispatches that are remembered.
      prior: ratios of step times that a calibration measured, or warming up, for chains; what was measured while
        serving is weighed against it.
      overhead_s: what a dispatch takes besides its steps; short ones would look slow without it.
      switch_s: what the first dispatch behind one of another arm takes more: its code and tables are cold.
      full: steps of a full dispatch.
      touched: experts that verifications should touch, where a head predicts them.
    """

    arms: tuple[AnyTopology, ...]
    memory: float = 200.0
    prior: StepRatios | None = None
    overhead_s: float = 0.0
    switch_s: float = field(default=0.0, init=False)
    full: int = field(default=1, init=False)
    touched: TouchedExperts = field(init=False)
    _times: list[dict[int, ArmTime]] = field(init=False)
    _skipped: dict[int, ArmTime] = field(default_factory=dict, init=False)
    _told: dict[int, list[Known]] = field(default_factory=dict, init=False)
    _last: int = field(default=-1, init=False)
    _switches: float = field(default=0.0, init=False)
    _pace: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        self.touched = TouchedExperts(self.memory)
        self._times = [{} for _ in self.arms]

    def knows_plain(self, size: int) -> bool:
        """Whether plain decoding ran with this number of rows (``bucket``)."""
        return size in self._times[0]

    def seen(self, place: int, size: int | None = None) -> float:
        """Dispatches of an arm with this number of rows, or with any."""
        if size is None:
            return sum(time.count for time in self._times[place].values())
        return self._times[place][size].count if size in self._times[place] else 0.0

    def plain_s(self, size: int, now: bool = False) -> float:
        """Time of a plain step, from the nearest number of rows at which it is known; at the machine's pace of now."""
        return self._times[0][_nearest(self._times[0], size)].mean_s * (self._pace if now else 1.0)

    def plain_error(self, size: int) -> float:
        """Relative error of a plain step's time with this number of rows."""
        return self._times[0][size].error if size in self._times[0] else 0.0

    def skipped(self, size: int) -> tuple[float, float]:
        """Time of a step that drafts and then verifies nothing over that of a plain one, and its relative error.

        Never below 1. It is taken for a plain one until dispatches of nothing else were measured.
        """
        spent, plain = self._skipped.get(size), self._times[0].get(size)
        if spent is None or plain is None or spent.count < SEEN_TO_TRUST:
            return 1.0, 0.0
        return max(1.0, spent.mean_s / plain.mean_s), math.hypot(spent.error, plain.error)

    def took(self, place: int, size: int, outcome: Outcome, in_use: bool) -> None:
        """Takes note of a dispatch's time, as if it had been a full one, and of the experts that it should touch.

        Of a dispatch in which some steps were skipped, these are taken to last as long as others that were; whatever
        more they took counts for the rest.

        Args:
          place: of its arm.
          size: of its rows.
          outcome: what it did.
          in_use: whether it is the arm that was found best, whose dispatches mostly follow each other.
        """
        self.touched.add(outcome.touched)
        self.full, steps = max(self.full, outcome.steps), outcome.steps - outcome.skipped
        own_s, over_s = outcome.time_s - self.overhead_s, self.overhead_s / self.full
        changed = place != self._last
        if changed:
            if in_use and not outcome.skipped and self.seen(place, size) >= SEEN_TO_TRUST:
                self._switched(own_s, (self._times[place][size].mean_s * self._pace - over_s) * steps)
            own_s -= self.switch_s
        self._last, own_s = place, max(own_s, 0.1 * outcome.time_s)
        if outcome.skipped:
            if not self._times[0]:
                return
            if not steps:
                spent = self._skipped.setdefault(size, ArmTime())
                spent.add((own_s / outcome.skipped + over_s) / self._pace, self.memory, outcome.skipped / self.full)
                return
            plain_s = self.plain_s(size) * self._pace - over_s
            own_s = max(own_s - outcome.skipped * self.skipped(size)[0] * plain_s, 0.5 * steps * plain_s)
        drafts, spent = self.arms[place].max_depth, self._times[place].setdefault(size, ArmTime())
        experts = outcome.touched[drafts - 1] if len(outcome.touched) >= drafts > 0 else None
        step_s, weight = own_s / steps + over_s, steps / self.full
        usual_s, pace = spent.mean_s if experts is None else spent.with_experts(experts), self._pace
        if spent.count >= SEEN_TO_TRUST and not changed:
            now = min(max(step_s / usual_s, 0.5 * pace), 2.0 * pace)
            self._pace += PACE_SHARE * weight * (now - pace)
        spent.add(step_s / pace, self.memory, weight, usual_s)
        if experts is not None:
            spent.touching(experts, self.memory)

    def _switched(self, own_s: float, usual_s: float) -> None:
        """Takes note of what a change of arms took."""
        self._switches = min(self._switches + 1, self.memory)
        more_s = min(max(own_s - usual_s, -0.5 * usual_s), 0.5 * usual_s)
        self.switch_s = max(0.0, self.switch_s + (more_s - self.switch_s) / self._switches)

    def ratios(self, size: int) -> list[Known]:
        """Time of each arm's step over that of a plain one; a chain's where need be from the lengths around."""
        found = [(1.0, 0.0), *(self._measured(place, size) for place in range(1, len(self.arms)))]
        self._pool(found, self._calibrated(size))
        known = [place for place, arm in enumerate(self.arms) if arm.is_chain and found[place] is not UNKNOWN]
        for below, above in pairwise(known):
            first, last = self.arms[below].max_depth, self.arms[above].max_depth
            low, (high, error) = found[below][0], found[above]
            for place in range(below + 1, above):
                share = (self.arms[place].max_depth - first) / (last - first)
                found[place] = low + share * (high - low), error + GUESSED
        return found

    def _pool(self, found: list[Known], told: Sequence[Known]) -> None:
        """Weighs what was measured while serving against what is known beforehand, for all chains together.

        What drafts add to a step is taken to be that share more or less of what was told for all chains, which every
        measurement tells about, and besides each may differ by itself: two normal laws, and their mean given both.

        Args:
          found: ratio and relative error by arm, as measured; becomes what is known in all.
          told: ratio by chain, and the relative error that each has by itself.
        """
        precision, scaled = 1.0 / ALIKE**2, 1.0 / ALIKE**2
        for (ratio, error), (guess, unsure) in zip(found[1:], told[1:], strict=False):
            if ratio is not None and guess is not None:
                weight = (guess - 1.0) / ((error * ratio) ** 2 + (unsure * guess) ** 2)
                precision, scaled = precision + weight * (guess - 1.0), scaled + weight * (ratio - 1.0)
        scale = scaled / precision
        for place, (guess, unsure) in enumerate(told):
            if not place or guess is None:
                continue
            (ratio, error), more = found[place], guess - 1.0
            guess, spread = 1.0 + scale * more, more * more / precision + (unsure * guess) ** 2
            if ratio is not None:
                share = spread / (spread + (error * ratio) ** 2)
                guess, spread = guess + share * (ratio - guess), spread * (1.0 - share)
            found[place] = guess, math.sqrt(spread) / guess

    def _calibrated(self, size: int) -> Sequence[Known]:
        """What is known beforehand of each chain's ratio, and its error by itself."""
        if self.prior is None:
            return ()
        if size not in self._told:
            told = [self.prior.at(arm.max_depth, 2**size) for arm in self.arms if arm.is_chain]
            each = self.prior.each
            self._told[size] = [UNKNOWN if one is None else (one[0], each * one[1]) for one in told]
        return self._told[size]

    def _measured(self, place: int, size: int) -> Known:
        """Measured ratio of times and its relative error, from the nearest number of rows at which both are known."""
        times, plain = self._times[place], self._times[0]
        near = size
        if size not in times or size not in plain:
            both = times.keys() & plain.keys()
            if not both:
                return UNKNOWN
            near = _nearest(both, size)
        arm, other = times[near], plain[near]
        experts = self.touched.at(self.arms[place].max_depth)  # a tree was told of none, its mean stays
        time_s = arm.mean_s if experts is None else arm.with_experts(experts)
        return time_s / other.mean_s, math.hypot(arm.error, other.error) + GUESSED * abs(near - size)


def _nearest(sizes: Collection[int], size: int) -> int:
    """Of some sizes the nearest one, of two the smaller."""
    return size if size in sizes else min(sizes, key=lambda s: (abs(s - size), s))


def bucket(rows: int) -> int:
    """Number of rows as a power of two: 1, 2, 3-4, 5-8, ... are 0, 1, 2, 3, ..."""
    return max(rows - 1, 0).bit_length()
