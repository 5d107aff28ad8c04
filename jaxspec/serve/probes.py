"""Which arm an adaptive control tries, to learn something, while another one is best: bounded in what it may lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxspec.serve.arm_time import SEEN_TO_TRUST
from jaxspec.serve.control import Decision, Outcome
from jaxspec.serve.found import ALL, Verified
from jaxspec.serve.step_times import StepTimes


class Gain(NamedTuple):
    """Tokens per second of an arm over those of plain decoding.

    Attributes:
      value: predicted; 0 where nothing is known.
      timing, drafting: relative standard errors of its step's time and of its tokens.
      least: what it is for sure.
      hope: what it may be at most. A tree may be hoped to accept no less than chains do now, whatever it did when it
        ran.
      verified: steps in which it verifies drafts; the others are plain.
    """

    value: float
    timing: float
    drafting: float
    least: float
    hope: float
    verified: Verified = ALL


NO_GAIN = Gain(0.0, 0.0, 0.0, 0.0, math.inf)


@dataclass(frozen=True)
class AdaptiveSpec:
    """How cautious an adaptive control is.

    Attributes:
      margin: an arm must beat plain decoding by this share, with the lower end of what is known.
      hysteresis: share by which another arm must beat the one in use.
      sureness: standard errors between the estimate and that lower end.
      probe_share: most of all time that probes may lose.
      first_steps: plain steps' worth of time that a fresh engine may lose before it has earned any.
      memory, verifications: dispatches whose times, and verifications whose accepted drafts estimates remember.
      shortest_wait, longest_wait: steps until the next probe; the wait doubles from one to the other.
      longest_chain_wait: the same where no chain is in use: the cheapest one tells whether texts have changed.
      contest_wait, longest_contest_wait: steps until an arm that may be better than the best one is tried again; the
        wait doubles.
      trial_wait: steps until one that should be better, but not for sure, is tried again.
      vain_wait: steps more for a tree that could not pay if it accepted what chains do.
      longest_probe: dispatches for which a probe goes on while its arm may be better than the best one.
      plain_steps, drafting_steps: steps until it thinks again; fewer where requests come and go, and at the beginning.
    """

    margin: float = 0.02
    hysteresis: float = 0.02
    sureness: float = 1.64
    probe_share: float = 0.02
    first_steps: int = 24
    memory: float = 200.0
    verifications: float = 800.0
    shortest_wait: int = 64
    longest_wait: int = 4096
    longest_chain_wait: int = 512
    contest_wait: int = 64
    longest_contest_wait: int = 512
    trial_wait: int = 64
    vain_wait: int = 65536
    longest_probe: int = 4
    plain_steps: int = 32
    drafting_steps: int = 16


@dataclass
class Probes:
    """Tries arms that are not the best one, as far as is known.

    Probes may lose a share of all time, and what was rejected waits twice as long each time: chains together, each
    tree for itself. An arm that may be better than the best one is tried again sooner than one that is not: that costs
    little, and a few unlucky dispatches would keep it out for long.

    Attributes:
      spec: how cautious.
      chains: how many arms are chains, plain decoding among them; trees follow.
      times: of all arms.
      steps: that were run.
      lost_s: what probes, and bringing drafters up to date, have lost.
    """

    spec: AdaptiveSpec
    chains: int
    times: StepTimes
    steps: int = field(default=0, init=False)
    lost_s: float = field(default=0.0, init=False)
    _total_s: float = field(default=0.0, init=False)
    _wait: dict[int, int] = field(default_factory=dict, init=False)
    _ran: dict[int, int] = field(default_factory=dict, init=False)
    _contest: int = field(default=0, init=False)
    _contest_wait: int = field(init=False)
    _going: int = field(default=0, init=False)
    _more: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._contest_wait = self.spec.contest_wait

    def choose(self, best: int, best_gain: float, size: int, gains: Sequence[Gain]) -> int | None:
        """An arm worth another look, where the budget allows one."""
        again, self._going = self._going, 0
        if again not in (0, best) and self._more > 0 and self._at_most(again, best, gains) > best_gain:
            self._going = again
            return again
        first_s = self.spec.first_steps * self.times.plain_s(size)
        if self.lost_s >= first_s + self.spec.probe_share * self._total_s:
            return None
        for place in range(self.chains - 1, len(gains)):
            # The longest chain tells something about every position and every shorter one; trees are not told about.
            if self.times.seen(place) < 2:
                return place
        if best and self._due(0, self._ran.get(0, 0)):
            return 0  # what plain decoding takes must stay known
        others = [place for place in range(1, len(gains)) if place != best]
        if self._contest <= self.steps:
            rival = max(others, key=lambda place: self._at_most(place, best, gains), default=0)
            if self._at_most(rival, best, gains) > best_gain:
                return rival
        due: list[tuple[float, int]] = []
        for place in others:
            # Also a chain without hope: workloads change. It tells about trees, which then need not be run in vain.
            one, tree, group = gains[place], place >= self.chains, self._group(place)
            vain = tree and one.hope <= best_gain
            if self._due(group, self._ran.get(group, -self.spec.shortest_wait) + vain * self.spec.vain_wait):
                due.append((one.hope if tree else one.value, place))
        return max(due)[1] if due else None

    def ran(self, place: int, outcome: Outcome) -> None:
        """Takes note of a dispatch."""
        self.steps += outcome.steps
        self._ran[self._group(place)] = self.steps
        self._total_s += outcome.time_s + outcome.lost_s
        self.lost_s += outcome.lost_s

    def learnt(self, place: int, size: int, gain: Gain, decision: Decision, outcome: Outcome) -> None:
        """Takes note of what a probe lost, and of how long its like waits now.

        What it lost is what was predicted, for the tokens of one dispatch are much too much a matter of luck.

        Args:
          place: of its arm.
          size: of its rows.
          gain: of its arm, with what it taught.
          decision: to run it.
          outcome: what it did.
        """
        group, taught = self._group(place), 1 - outcome.skipped / outcome.steps
        value = gain.value if decision.gain is None else decision.gain
        self.lost_s += max(0.0, 1.0 - value / decision.best) * taught * outcome.time_s
        if self._going != place:
            self._going, self._more = place, self.spec.longest_probe
            self.lost_s += 2 * self.times.switch_s
        self._more -= 1
        if not taught:
            return
        wait = self._wait.get(group, self.spec.shortest_wait)
        if place:
            trial = value >= decision.best
            self._contest = self.steps + (self.spec.trial_wait if trial else self._contest_wait)
            if not trial:
                self._contest_wait = min(2 * self._contest_wait, self.spec.longest_contest_wait)
            if self.times.seen(place, size) < SEEN_TO_TRUST and gain.hope > decision.best:
                self._ran[group] -= wait  # it may pay, and that is not known yet: only the budget bounds when it is due
                return
        longest = self.spec.longest_chain_wait if group == 1 else self.spec.longest_wait
        self._wait[group] = min(2 * wait, longest)

    def forget_waits(self) -> None:
        """What was learnt about waiting, with drafts or without, belongs to the other side."""
        self._wait = {}

    def _group(self, place: int) -> int:
        """What waits together: plain decoding, all chains, each tree."""
        return min(place, 1) if place < self.chains else place

    def _due(self, group: int, since: int) -> bool:
        """Whether a group has waited long enough since a step."""
        return since + self._wait.get(group, self.spec.shortest_wait) <= self.steps

    def _at_most(self, place: int, best: int, gains: Sequence[Gain]) -> float:
        """Gain of an arm at most, beside the best one: of chains only positions differ that one of them has not."""
        one, unsure = gains[place], gains[place].drafting
        if best and max(place, best) < self.chains:
            unsure = max(0.0, unsure - gains[best].drafting)
        return one.value * (1 + self.spec.sureness * math.hypot(one.timing, unsure))
