"""Which arm an adaptive control tries, to learn something, while another one is best: bounded in what it may lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxspec.serve.control import Decision, Outcome
from jaxspec.serve.found import ALL, Verified
from jaxspec.serve.step_times import StepTimes

GOLDEN, UNEVEN = 0.6180339887, 0.25  # the ratio that repeats least; a share
LEARNING = 32  # full dispatches that probes may take at first


class Gain(NamedTuple):
    """Tokens per second of an arm over those of plain decoding.

    Attributes:
      value: predicted; 0 where nothing is known.
      timing, drafting: relative standard errors of its step's time over that of a plain one, as far as it may be less,
        and of its tokens.
      least: what it is for sure.
      hope: what it may be at most. A tree may be hoped to accept no less than chains do now, whatever it did when it
        ran.
      verified: steps in which it verifies drafts; the others are plain.
      more: time that a verification adds to a step, in plain steps.
      part: of its time that steps take in which it verifies.
    """

    value: float
    timing: float
    drafting: float
    least: float
    hope: float
    verified: Verified = ALL
    more: float = 0.0
    part: float = 1.0


NO_GAIN = Gain(0.0, 0.0, 0.0, 0.0, math.inf)


@dataclass(frozen=True)
class AdaptiveSpec:
    """How cautious an adaptive control is.

    Attributes:
      margin: an arm must beat plain decoding by this share, with the lower end of what is known.
      hysteresis: share by which another arm must beat the one in use.
      sureness: standard errors between the estimate and that lower end.
      probe_share: most of all time that probes may lose.
      probe_steps, first_probes: most of all steps that may be probes', besides so many, and ``LEARNING`` dispatches at
        least, that a fresh engine learns from.
      first_steps: plain steps' worth of time that a fresh engine may lose without ever earning it, where nothing
        was known beforehand.
      most_steps: the same that may be lost before it is earned.
      memory, verifications, lookups: dispatches whose times, verifications whose accepted drafts, and steps of which it
        is remembered how many rows had drafts.
      shortest_wait, longest_wait: steps until the next probe; the wait doubles from one to the other.
      chain_wait, idle_share: where no chain is in use, the cheapest one tells whether texts have changed: each time
        this many steps have gone by at least, and so many that it loses no more than this share of them.
      contest_wait: steps until an arm that may be better than the best one by the hysteresis is tried again.
      vain_wait: steps more for a tree that could not pay if it accepted what chains do.
      longest_probe: dispatches for which a probe goes on while its arm may take the best one's place.
      thinking_steps: steps until it thinks again; fewer where the rows are others, and at the beginning.
    """

    margin: float = 0.02
    hysteresis: float = 0.02
    sureness: float = 1.28
    probe_share: float = 0.005
    probe_steps: float = 0.02
    first_probes: int = 512
    first_steps: int = 24
    most_steps: int = 12
    memory: float = 200.0
    verifications: float = 1600.0
    lookups: float = 96.0
    shortest_wait: int = 64
    longest_wait: int = 4096
    chain_wait: int = 128
    idle_share: float = 0.005
    contest_wait: int = 48
    vain_wait: int = 65536
    longest_probe: int = 4
    thinking_steps: int = 96

    def to_replace(self, held: Gain) -> float:
        """What another arm must gain at least, to be used instead of one that drafts."""
        return held.value * (1.0 + self.hysteresis * held.verified.share)


@dataclass
class Probes:
    """Tries arms that are not the best one, as far as is known.

    Probes may lose a share of all time and take a share of all steps, and what was rejected waits twice as long each
    time: chains together, each tree for itself. An arm that may take the best one's place is tried again sooner than
    one that may not: that costs little, and a few unlucky dispatches would keep it out for long.

    Attributes:
      spec: how cautious.
      chains: how many arms are chains, plain decoding among them; trees follow.
      times: of all arms.
      steps: that were run.
      probed: steps in which probes verified drafts, or of plain ones.
      owed_s: what probes, and bringing drafters up to date, have lost and not earned yet.
    """

    spec: AdaptiveSpec
    chains: int
    times: StepTimes
    steps: int = field(default=0, init=False)
    probed: int = field(default=0, init=False)
    owed_s: float = field(default=0.0, init=False)
    _wait: dict[int, int] = field(default_factory=dict, init=False)
    _ran: dict[int, int] = field(default_factory=dict, init=False)
    _contest: float = field(default=0.0, init=False)
    _going: int = field(default=0, init=False)
    _more: int = field(default=0, init=False)
    _asked: int = field(default=0, init=False)

    def choose(self, best: int, best_gain: float, rows: int, gains: Sequence[Gain]) -> int | None:
        """An arm worth another look, where the budget allows one."""
        self._asked += 1
        again, self._going = self._going, 0
        if not self._affordable(rows):
            return None
        if again not in (0, best) and self._more > 0 and self._may_win(again, best, gains):
            self._going = again
            return again
        for place in range(self.chains - 1, len(gains)):
            # The longest chain tells something about every position and every shorter one; trees are not told about.
            # One that ran and found no draft waits, as all do.
            if (seen := self.times.seen(place)) < 2 and (seen or self._due(place)):
                return place
        if best and self._due(0):
            return 0  # what plain decoding takes must stay known
        others = [place for place in range(1, len(gains)) if place != best]
        if self._contest <= self.steps:
            rival = max(others, key=lambda place: self._at_most(place, best, gains), default=0)
            if self._may_win(rival, best, gains):
                return rival
        due: list[tuple[float, int]] = []
        for place in others:
            # Also a chain without hope: workloads change. It tells about trees, which then need not be run in vain.
            one, tree = gains[place], place >= self.chains
            if self._due(place, self.spec.vain_wait if tree and one.hope <= best_gain else 0):
                due.append((one.hope if tree else one.value, place))
        return max(due)[1] if due else None

    def _affordable(self, rows: int) -> bool:
        """Whether neither the steps nor the time are used up that probes may take."""
        first = max(self.spec.first_probes, LEARNING * self.times.full)
        in_number = self.probed < first + self.spec.probe_steps * self.steps
        return in_number and self.owed_s < self.spec.most_steps * self.times.plain_s(rows)

    def ran(self, place: int, outcome: Outcome, chosen: bool) -> None:
        """Takes note of a dispatch; where requests want no drafts it was not chosen, and earns nothing."""
        if not self.steps and self.times.prior is None:
            self.owed_s = -self.spec.first_steps * outcome.time_s / outcome.steps
        if chosen:
            self.steps += outcome.steps
            self._lost(outcome.lost_s - self.spec.probe_share * (outcome.time_s + outcome.lost_s))
        self._ran[self._group(place)] = self.steps

    def learnt(self, place: int, hope: float, decision: Decision, outcome: Outcome) -> None:
        """Takes note of what a probe lost, and of how long its like waits now.

        Args:
          place: of its arm.
          hope: what its gain may be, where its time is not known well yet.
          decision: to run it.
          outcome: what it did.
        """
        group, fresh = self._group(place), place == 0 or self._going != place
        self._lost(outcome.time_s - self._instead_s(decision, outcome) + fresh * self.times.switch_s)
        if fresh:
            self._going, self._more = place, self.spec.longest_probe
        self._more -= 1
        self.probed += outcome.steps - outcome.skipped
        wait = self._wait.get(group, self.spec.shortest_wait)
        if place:
            self._contest = self.steps + self.uneven(self.spec.contest_wait)
            if outcome.skipped < outcome.steps and hope > decision.best:
                self._ran[group] -= wait  # it may pay, and that is not known yet: only the budget bounds when it is due
                return
        if fresh:
            # The more it loses, the longer chains wait: together with others that never pay they stay within a share.
            slower = (1.0 - (decision.gain or 1.0) / decision.best) * outcome.steps
            begins_s = outcome.lost_s + 2 * self.times.switch_s
            dear = (slower + begins_s / self.times.plain_s(outcome.rows)) / self.spec.idle_share
            longest = max(self.spec.chain_wait, dear) if group == 1 else math.inf
            self._wait[group] = int(min(2 * wait, longest, self.spec.longest_wait))

    def _instead_s(self, decision: Decision, outcome: Outcome) -> float:
        """What the best arm would have taken for a probe's tokens. They are a matter of luck, which sums do without."""
        return outcome.tokens / outcome.rows * self.times.plain_s(outcome.rows) / decision.best

    def _lost(self, more_s: float) -> None:
        """Less than nothing is owed only at first."""
        self.owed_s = max(min(self.owed_s, 0.0), self.owed_s + more_s)

    def forget_waits(self) -> None:
        """What was learnt about waiting, with drafts or without, belongs to the other side."""
        self._wait = {}

    def _group(self, place: int) -> int:
        """What waits together: plain decoding, all chains, each tree."""
        return min(place, 1) if place < self.chains else place

    def _due(self, place: int, later: int = 0) -> bool:
        """Whether an arm's group has waited long enough, and so many steps; drafts that never ran need not wait."""
        group = self._group(place)
        since = self._ran.get(group, -math.inf if place else 0.0)
        return since + later + self.uneven(self._wait.get(group, self.spec.shortest_wait)) <= self.steps

    def uneven(self, wait: int) -> float:
        """A wait that differs from time to time, or all probes might meet texts at the same place."""
        return wait * (1 - UNEVEN + 2 * UNEVEN * (self._asked * GOLDEN % 1.0))

    def _may_win(self, place: int, best: int, gains: Sequence[Gain]) -> bool:
        """Whether it may gain enough to be used instead of the best one; of plain decoding, whether it may gain."""
        least = self.spec.to_replace(gains[best]) if best else 1.0
        return self._at_most(place, best, gains) > least

    def _at_most(self, place: int, best: int, gains: Sequence[Gain]) -> float:
        """Gain of an arm at most, beside the best one.

        Of chains only positions differ that one of them has not; and of all that draft, only their own steps' times.
        """
        one, other = gains[place], gains[best]
        unsure, timing = one.drafting, one.timing
        if best and place:
            timing = max(one.part, other.part) * self.times.apart(place, best)
        if best and max(place, best) < self.chains:
            unsure = max(0.0, unsure - other.drafting)
        return one.value * (1 + self.spec.sureness * math.hypot(timing, unsure))
