"""The control that measures while it serves, so that drafting never costs: ``num_speculative_tokens: "auto"``."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import NamedTuple

from jaxspec.draft.lengths import Lengths
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.serve.arm_time import SEEN_TO_TRUST, ArmTime
from jaxspec.serve.control import ByBatchSize, Control, Decision, Fixed, Outcome
from jaxspec.serve.survival import RequestSurvival, Survival
from jaxspec.serve.touched import TouchedExperts
from jaxspec.topology import AnyTopology, chain

Known = tuple[float | None, float]  # a number and its relative error
UNKNOWN: Known = (None, math.inf)
GUESSED = 0.1  # relative error of a ratio of times taken from another length, or from half or twice the rows


class Gain(NamedTuple):
    """Tokens per second of an arm over those of plain decoding.

    Attributes:
      value: predicted; 0 where nothing is known.
      timing, drafting: relative standard errors of its step's time and of its tokens.
      least: what it is for sure.
      hope: what it may be at most. A tree may be hoped to accept no less than chains do now, whatever it did when it
        ran.
    """

    value: float
    timing: float
    drafting: float
    least: float
    hope: float


NO_GAIN = Gain(0.0, 0.0, 0.0, 0.0, math.inf)


def control_of(lengths: Lengths, prior: StepRatios | None = None) -> Control:
    """The control that a ``speculative_config`` asks for; a prior is what a calibration measured beforehand."""
    if lengths.adaptive:
        chains = [chain(length) for length in range(lengths.topology.max_depth + 1)]
        return Adaptive((*chains, *lengths.trees), prior=prior)
    return Fixed(lengths.topology) if lengths.ranges is None else ByBatchSize(lengths.ranges, lengths.otherwise)


@dataclass(frozen=True)
class AdaptiveSpec:
    """How cautious an adaptive control is.

    Attributes:
      margin: an arm must beat plain decoding by this share, with the lower end of what is known.
      sureness: standard errors between the estimate and that lower end.
      probe_share: most of all time that probes may lose.
      first_steps: plain steps' worth of time that a fresh engine may lose before it has earned any.
      hysteresis: share by which another arm must beat the one in use.
      memory, verifications: dispatches whose times, and verifications whose accepted drafts estimates remember.
      contest_wait, longest_contest_wait: steps until an arm that may be better than the best one is tried again; the
        wait doubles.
      trial_wait: steps until one that should be better, but not for sure, is tried again.
      longest_probe: dispatches for which a probe goes on while its arm may be better than the best one: what a machine
        does first after a change of arms takes longer.
      shortest_wait, longest_wait: steps until the next probe; the wait doubles from one to the other.
      longest_chain_wait: the same where no chain is in use: the cheapest one tells whether texts have changed.
      plain_steps, drafting_steps: steps until it thinks again; fewer where requests come and go, and at the beginning.
      vain_wait: steps more for a tree that could not pay if it accepted what chains do.
    """

    margin: float = 0.02
    sureness: float = 1.64
    probe_share: float = 0.02
    first_steps: int = 24
    hysteresis: float = 0.02
    memory: float = 200.0
    verifications: float = 800.0
    shortest_wait: int = 64
    longest_wait: int = 4096
    longest_chain_wait: int = 512
    contest_wait: int = 64
    longest_contest_wait: int = 512
    vain_wait: int = 65536
    trial_wait: int = 64
    longest_probe: int = 4
    plain_steps: int = 32
    drafting_steps: int = 16


@dataclass
class Adaptive:
    """Chooses the arm that pays most, and plain decoding unless one pays for sure (do no harm).

    The gain of an arm is the tokens that it commits per step, over the ratio of its step's time to that of a plain
    step: Cascade's utility (2506.20675). Times are those of whole dispatches on this machine, by number of rows, so
    everything counts: drafting, the experts that a verification touches, the host. Where a head predicts the target's
    routing, a chain's time is read at the experts that its next verification should touch.

    Chains know survival together, and the time of one tells about those of others. A tree knows its own: its tokens
    are what its own depths accepted, with the chains' survival standing in for few verifications (a full tree holds
    the chain, so it should not accept less), and its time is never guessed. Probes may lose a share of all time, and
    what was rejected waits twice as long each time: chains together, each tree for itself. An arm that may be better
    than the best one, as far as its own times say, is timed again every ``contest_wait`` steps instead: that costs
    little, and a few unlucky times would keep it out for long.

    Steps that were skipped, because no row had a draft, are plain steps: what an arm takes and brings is that of the
    others, and both are thinned by their share before arms are compared.

    Attributes:
      arms: plain decoding, chains by length, then trees.
      spec: how cautious it is.
      prior: ratios of step times that a calibration measured, or warming up, for chains that were not run often enough
        yet.
      overhead_s: what a dispatch takes besides its steps; short ones would look slow without it.
      survival: of drafts of all arms, to compare requests with.
      touched: experts that verifications should touch, where a head predicts them.
      switch_s: what the first dispatch behind one of another arm takes more: its code and tables are cold.
    """

    arms: tuple[AnyTopology, ...]
    spec: AdaptiveSpec = field(default_factory=AdaptiveSpec)
    prior: StepRatios | None = None
    overhead_s: float = 0.0
    survival: Survival = field(init=False)
    touched: TouchedExperts = field(init=False)
    switch_s: float = field(default=0.0, init=False)
    _depths: list[int] = field(init=False)
    _longest: int = field(init=False)
    _counts: list[Survival] = field(init=False)
    _times: list[dict[int, ArmTime]] = field(init=False)
    _full: int = field(default=1, init=False)
    _last: int = field(default=-1, init=False)
    _going: int = field(default=0, init=False)
    _more: int = field(default=0, init=False)
    _switches: float = field(default=0.0, init=False)
    _shares: dict[int, float] = field(default_factory=dict, init=False)
    _told: dict[int, list[Known]] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _total_s: float = field(default=0.0, init=False)
    _lost_s: float = field(default=0.0, init=False)
    _wait: dict[int, int] = field(default_factory=dict, init=False)
    _ran: dict[int, int] = field(default_factory=dict, init=False)
    _held: int = field(default=0, init=False)
    _contest: int = field(default=0, init=False)
    _asked: tuple[int, int | None] | None = field(default=None, init=False)
    _until: int = field(default=0, init=False)
    _same: Decision = field(init=False)
    _contest_wait: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._depths = [arm.max_depth for arm in self.arms]
        memory, deepest = self.spec.verifications, max(self._depths)
        self.survival, chains = Survival(deepest, memory), Survival(deepest, memory)
        self.touched = TouchedExperts(self.spec.memory)
        self._longest = sum(arm.is_chain for arm in self.arms) - 1
        self._counts = [chains if arm.is_chain else Survival(arm.max_depth, memory) for arm in self.arms]
        self._times = [{} for _ in self.arms]
        self._contest_wait = self.spec.contest_wait

    def choose(
        self, rows: int, waiting: int, requests: RequestSurvival | None = None, steps: int | None = None
    ) -> Decision:
        """Arm of the next dispatch for these active rows; ``requests`` has what is known of each."""
        size = bucket(rows)
        asked = size, None if requests is None else requests.changes
        if asked == self._asked and self._steps < self._until:
            return self._same
        self._asked = None
        if size not in self._times[0]:
            return Decision(self.arms[0])
        gains = self._gains(size, requests)
        best, best_gain = self._best(gains, self._shares.get(size, 1.0))
        brief = steps is not None and steps < self._full  # most of its time would say nothing about the arm
        probe = None if brief else self._probe(best, best_gain, size, gains)
        if probe is not None:
            return Decision(self.arms[probe], True, gains[probe].value or None, best_gain)
        if best != self._held:
            if not best or not self._held:  # what was learnt about waiting belongs to the other side
                self._wait = {}
            self._held = best
        chosen = Decision(self.arms[best], False, best_gain, best_gain)
        if not brief:
            most = self.spec.drafting_steps if best else self.spec.plain_steps
            self._asked, self._until, self._same = asked, self._steps + min(most, self._steps // 8), chosen
        return chosen

    def _best(self, gains: Sequence[Gain], share: float) -> tuple[int, float]:
        """The arm to use and its gain: the one in use as long as it pays and no other is clearly better."""
        held = self._held if gains[self._held].least > 1.0 else 0
        best, value = held, gains[held].value if held else 1.0
        least = value * (1.0 + self.spec.hysteresis * share) if held else 0.0
        for place, gain in enumerate(gains[1:], start=1):
            if gain.least > 1.0 + share * self.spec.margin and gain.value > max(least, value):
                best, value = place, gain.value
        return best, value

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Takes note of a dispatch's time and of what was accepted."""
        if not outcome.steps:
            return
        place, size = self.arms.index(decision.arm), bucket(outcome.rows)
        drafts = decision.length
        experts = outcome.touched[drafts - 1] if len(outcome.touched) >= drafts > 0 else None
        self._took(place, size, outcome, experts)
        self.touched.add(outcome.touched)
        for tried, accepted in outcome.accepted.items():
            self.survival.add(tried, accepted)
            self._counts[place].add(tried, accepted)
        self._steps += outcome.steps
        self._ran[self._group(place)] = self._steps
        self._total_s += outcome.time_s + outcome.lost_s
        self._lost_s += outcome.lost_s
        if decision.probe:
            self._probed(place, size, decision, outcome)

    def _probed(self, place: int, size: int, decision: Decision, outcome: Outcome) -> None:
        """Takes note of what a probe lost, and of how long its like waits now.

        What it lost is what was predicted, for the tokens of one dispatch are much too much a matter of luck.
        """
        gain, group, taught = self._gains(size)[place], self._group(place), 1 - outcome.skipped / outcome.steps
        value = gain.value if decision.gain is None else decision.gain
        self._lost_s += max(0.0, 1.0 - value / decision.best) * taught * outcome.time_s
        if self._going != place:
            self._going, self._more = place, self.spec.longest_probe
            self._lost_s += 2 * self.switch_s
        self._more -= 1
        if not taught:
            return
        wait = self._wait.get(group, self.spec.shortest_wait)
        if place:
            trial = value >= decision.best
            self._contest = self._steps + (self.spec.trial_wait if trial else self._contest_wait)
            if not trial:
                self._contest_wait = min(2 * self._contest_wait, self.spec.longest_contest_wait)
            if self._seen(place, size) < SEEN_TO_TRUST and gain.hope > decision.best:
                self._ran[group] -= wait  # it may pay, and that is not known yet: only the budget bounds when it is due
                return
        longest = self.spec.longest_chain_wait if group == 1 else self.spec.longest_wait
        self._wait[group] = min(2 * wait, longest)

    def _took(self, place: int, size: int, outcome: Outcome, experts: float | None) -> None:
        """Takes note of a dispatch's time, as if it had been a full one, and of the experts that it should touch.

        Steps that were skipped are taken to last as long as plain ones; whatever more they took counts for the others.
        """
        self._full, steps = max(self._full, outcome.steps), outcome.steps - outcome.skipped
        own_s, over_s = outcome.time_s - self.overhead_s, self.overhead_s / self._full
        if place != self._last:
            self._switched(place, size, outcome, own_s, over_s)
            own_s -= self.switch_s
        self._last, own_s = place, max(own_s, 0.1 * outcome.time_s)
        if place:
            known, weight = self._shares.get(size, 1.0), min(outcome.steps / self.spec.memory, 1.0)
            self._shares[size] = known + weight * (steps / outcome.steps - known)
        if outcome.skipped:
            if not steps or not self._times[0]:
                return
            plain_s = self._plain_s(size) - over_s
            own_s = max(own_s - outcome.skipped * plain_s, 0.5 * steps * plain_s)
        spent = self._times[place].setdefault(size, ArmTime())
        spent.add(own_s / steps + over_s, self.spec.memory, steps / self._full)
        if experts is not None:
            spent.touching(experts, self.spec.memory)

    def _switched(self, place: int, size: int, outcome: Outcome, own_s: float, over_s: float) -> None:
        """Takes note of what a change to the arm in use took, whose other dispatches mostly followed each other."""
        if place != self._held or outcome.skipped or self._seen(place, size) < SEEN_TO_TRUST:
            return
        usual_s = (self._times[place][size].mean_s - over_s) * outcome.steps
        self._switches = min(self._switches + 1, self.spec.memory)
        more_s = min(max(own_s - usual_s, -0.5 * usual_s), 0.5 * usual_s)
        self.switch_s = max(0.0, self.switch_s + (more_s - self.switch_s) / self._switches)

    def _group(self, place: int) -> int:
        """What waits together: plain decoding, all chains, each tree."""
        return min(place, 1) if place <= self._longest else place

    def _plain_s(self, size: int) -> float:
        """Time of a plain step, from the nearest number of rows at which it is known."""
        return self._times[0][_nearest(self._times[0], size)].mean_s

    def _gains(self, size: int, requests: RequestSurvival | None = None) -> list[Gain]:
        """Predicted gain of each arm over plain decoding, over steps with drafts and without."""
        share = self._shares.get(size, 1.0)
        theirs: list[tuple[float, float]] = []
        if requests is not None:
            everyone = [survival for survival, _ in self.survival.by_position()]
            theirs = list(zip(requests.mean(everyone), everyone, strict=True))
        chains, sureness, found = self._tokens(0, theirs), self.spec.sureness, []
        for place, (ratio, timing) in enumerate(self._ratios(size)):
            if ratio is None:
                found.append(NO_GAIN)
                continue
            floor, error = tokens, _ = chains[self._depths[place]]
            if place > self._longest:
                tokens, error = self._tokens(place, theirs)[-1]
            # What is known is that of steps with drafts; the others are plain steps.
            tokens, floor, whole = (1 + share * (x - 1) for x in (tokens, floor, ratio))
            drafting, timing, ratio = share * error / tokens, timing * share * ratio / whole, whole
            value = tokens / ratio
            unsure = sureness * math.hypot(drafting, timing)
            found.append(Gain(value, timing, drafting, value * (1 - unsure), max(tokens, floor) / ratio * (1 + unsure)))
        return found

    def _tokens(self, place: int, theirs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Expected tokens per step of an arm cut at each depth, the target's own included, and their standard error.

        Args:
          place: of the arm.
          theirs: survival of the requests in question, and of everyone, over all arms; the arm's is taken to relate
            likewise. Empty for everyone.
        """
        tokens, error, found = 1.0, 0.0, [(1.0, 0.0)]
        beside = self._counts[0] if place > self._longest else None
        found_by = self._counts[place].by_position(beside)
        for (survival, unsure), (own, every) in zip(found_by, theirs or repeat((1.0, 1.0)), strict=False):
            survival = survival * own / every if every else own
            tokens += survival if survival < 1.0 else 1.0
            error += unsure
            found.append((tokens, error))
        return found

    def _ratios(self, size: int) -> list[Known]:
        """Time of each arm's step over that of a plain one; a chain's where need be from the lengths around."""
        found = [(1.0, 0.0), *(self._measured(place, size) for place in range(1, len(self.arms)))]
        for place, told in enumerate(self._calibrated(size)):
            if place and told is not UNKNOWN and min(self._seen(place, size), self._seen(0, size)) < SEEN_TO_TRUST:
                found[place] = told
        known = [place for place in range(self._longest + 1) if found[place] is not UNKNOWN]
        for below, above in pairwise(known):
            first, last = self._depths[below], self._depths[above]
            low, (high, error) = found[below][0], found[above]
            for place in range(below + 1, above):
                share = (self._depths[place] - first) / (last - first)
                found[place] = low + share * (high - low), error + GUESSED
        return found

    def _calibrated(self, size: int) -> list[Known]:
        """What is known beforehand of each chain's ratio."""
        if self.prior is None:
            return []
        if size not in self._told:
            told = [self.prior.at(depth, 2**size) for depth in self._depths[: self._longest + 1]]
            self._told[size] = [UNKNOWN if one is None else one for one in told]
        return self._told[size]

    def _seen(self, place: int, size: int) -> float:
        """Dispatches of an arm with this number of rows."""
        return self._times[place][size].count if size in self._times[place] else 0.0

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
        experts = self.touched.at(self._depths[place])  # a tree was told of none, its mean stays
        time_s = arm.mean_s if experts is None else arm.with_experts(experts)
        return time_s / other.mean_s, math.hypot(arm.error, other.error) + GUESSED * abs(near - size)

    def _probe(self, best: int, best_gain: float, size: int, gains: Sequence[Gain]) -> int | None:
        """An arm worth another look, where the budget allows one."""
        again, self._going = self._going, 0
        if again not in (0, best) and self._more > 0 and self._at_most(again, best, gains) > best_gain:
            self._going = again
            return again
        first_s = self.spec.first_steps * self._plain_s(size)
        if self._lost_s >= first_s + self.spec.probe_share * self._total_s:
            return None
        for place in range(self._longest, len(self.arms)):
            # The longest chain tells something about every position and every shorter one; trees are not told about.
            if sum(time.count for time in self._times[place].values()) < 2:
                return place
        if best and self._due(0, self._ran.get(0, 0)):
            return 0  # what plain decoding takes must stay known
        others = [place for place in range(1, len(self.arms)) if place != best]
        if self._contest <= self._steps:
            rival = max(others, key=lambda place: self._at_most(place, best, gains), default=0)
            if self._at_most(rival, best, gains) > best_gain:
                return rival
        hopeful: list[tuple[float, int]] = []
        for place in others:
            # Also a chain without hope: workloads change. It tells about trees, which then need not be run in vain.
            vain = place > self._longest and gains[place].hope <= best_gain
            group = self._group(place)
            if self._due(group, self._ran.get(group, -self.spec.shortest_wait) + vain * self.spec.vain_wait):
                hopeful.append((gains[place].value if place <= self._longest else gains[place].hope, place))
        return max(hopeful)[1] if hopeful else None

    def _at_most(self, place: int, best: int, gains: Sequence[Gain]) -> float:
        """Gain of an arm at most, beside the best one: of chains only positions differ that one of them has not."""
        one, unsure = gains[place], gains[place].drafting
        if best and max(place, best) <= self._longest:
            unsure = max(0.0, unsure - gains[best].drafting)
        return one.value * (1 + self.spec.sureness * math.hypot(one.timing, unsure))

    def _due(self, group: int, since: int) -> bool:
        """Whether a group has waited long enough since a step."""
        return since + self._wait.get(group, self.spec.shortest_wait) <= self._steps


def _nearest(sizes: Collection[int], size: int) -> int:
    """Of some sizes the nearest one, of two the smaller."""
    return size if size in sizes else min(sizes, key=lambda s: (abs(s - size), s))


def bucket(rows: int) -> int:
    """Number of rows as a power of two: 1, 2, 3-4, 5-8, ... are 0, 1, 2, 3, ..."""
    return max(rows - 1, 0).bit_length()
