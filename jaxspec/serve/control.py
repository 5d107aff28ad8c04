"""What the next dispatch drafts: always the same, by batch size, or measured so that it never costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any, Protocol

from jaxspec.draft.lengths import Lengths
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.serve.arm_time import ArmTime
from jaxspec.serve.survival import Survival, mean_survival
from jaxspec.serve.touched import TouchedExperts
from jaxspec.topology import AnyTopology, chain

SEEN_TO_TRUST = 4  # dispatches before what was measured while serving replaces a calibration
Known = tuple[float | None, float]  # a number and its relative error
UNKNOWN: Known = (None, math.inf)
GUESSED = 0.1  # relative error of a ratio of times taken from another length, or from half or twice the rows


@dataclass(frozen=True)
class Decision:
    """What the next dispatch does.

    Attributes:
      arm: what is drafted; the topology of one node decodes plainly.
      probe: whether it is run to learn something and not because it is best.
      gain: predicted tokens per second over those of plain decoding, None where nothing is known yet.
      best: the gain of what it would have run without the probe.
    """

    arm: AnyTopology
    probe: bool = False
    gain: float | None = None
    best: float = 1.0

    @property
    def length(self) -> int:
        """K, the most drafts that a row can accept per step."""
        return self.arm.max_depth


@dataclass(frozen=True)
class Outcome:
    """What a dispatch did.

    Attributes:
      rows: active rows at its start.
      steps: steps that it ran.
      time_s: wall time of the dispatch.
      accepted: drafts that were tried per verification, to how many of them each such verification accepted.
      lost_s: time spent before it on bringing the drafter up to date.
      touched: experts per layer that the first 1, 2, ... drafts of a step were predicted to touch, mean over its
        steps; empty without a prediction.
      drafted: drafts of all rows that a step verified, mean over its steps.
      deepest: depth to which some row's drafts were verified, likewise.
    """

    rows: int
    steps: int
    time_s: float
    accepted: Mapping[int, Sequence[int]]
    lost_s: float = 0.0
    touched: tuple[float, ...] = ()
    drafted: float = 0.0
    deepest: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that it committed, those of verifications that were cut short left out."""
        return sum(len(a) + sum(a) for a in self.accepted.values())


class Control(Protocol):
    """Chooses among arms, programs that were compiled beforehand and share one state; a topology names each."""

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        """The arms."""
        ...

    def choose(self, rows: int, waiting: int, requests: Sequence[Survival] = ()) -> Decision:
        """Arm of the next dispatch for this many active rows and waiting requests."""
        ...

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Takes note of what came of a decision."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same arm."""

    arm: AnyTopology

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        """The one arm."""
        return (self.arm,)

    def choose(self, rows: int, waiting: int, requests: Sequence[Survival] = ()) -> Decision:
        """Arm of the next dispatch."""
        return Decision(self.arm)

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class ByBatchSize:
    """An arm for each range of batch sizes, as of vLLM's ``num_speculative_tokens_per_batch_size``.

    Attributes:
      ranges: lowest and highest number of requests, running and waiting, and the arm for them.
      otherwise: the arm outside of all ranges.
    """

    ranges: tuple[tuple[int, int, AnyTopology], ...]
    otherwise: AnyTopology

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        """The arms, without repetition."""
        return tuple(dict.fromkeys([self.otherwise, *(arm for _, _, arm in self.ranges)]))

    def choose(self, rows: int, waiting: int, requests: Sequence[Survival] = ()) -> Decision:
        """Arm of the next dispatch."""
        size = rows + waiting
        return Decision(next((arm for low, high, arm in self.ranges if low <= size <= high), self.otherwise))

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learns nothing."""


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
      memory: verifications, and dispatches, that estimates remember.
      shortest_wait, longest_wait: steps until the next probe; the wait doubles from one to the other.
      vain_wait: steps more for a tree that could not pay if it accepted what chains do.
    """

    margin: float = 0.02
    sureness: float = 1.64
    probe_share: float = 0.02
    first_steps: int = 24
    memory: float = 200.0
    shortest_wait: int = 64
    longest_wait: int = 4096
    vain_wait: int = 65536


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
    what was rejected waits twice as long each time: chains together, each tree for itself.

    Attributes:
      arms: plain decoding, chains by length, then trees.
      spec: how cautious it is.
      prior: ratios of step times that a calibration measured, for chains that were not run often enough yet.
      survival: of drafts of all arms, to compare requests with.
      touched: experts that verifications should touch, where a head predicts them.
    """

    arms: tuple[AnyTopology, ...]
    spec: AdaptiveSpec = field(default_factory=AdaptiveSpec)
    prior: StepRatios | None = None
    survival: Survival = field(init=False)
    touched: TouchedExperts = field(init=False)
    _depths: list[int] = field(init=False)
    _longest: int = field(init=False)
    _counts: list[Survival] = field(init=False)
    _times: list[dict[int, ArmTime]] = field(init=False)
    _told: dict[int, list[Known]] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _total_s: float = field(default=0.0, init=False)
    _lost_s: float = field(default=0.0, init=False)
    _wait: dict[int, int] = field(default_factory=dict, init=False)
    _next: dict[int, int] = field(default_factory=dict, init=False)
    _held: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._depths = [arm.max_depth for arm in self.arms]
        memory, deepest = self.spec.memory, max(self._depths)
        self.survival, chains = Survival(deepest, memory), Survival(deepest, memory)
        self.touched = TouchedExperts(memory)
        self._longest = sum(arm.is_chain for arm in self.arms) - 1
        self._counts = [chains if arm.is_chain else Survival(arm.max_depth, memory) for arm in self.arms]
        self._times = [{} for _ in self.arms]

    def choose(self, rows: int, waiting: int, requests: Sequence[Survival] = ()) -> Decision:
        """Arm of the next dispatch for these active rows; ``requests`` hold what is known of each."""
        size = bucket(rows)
        if size not in self._times[0]:
            return Decision(self.arms[0])
        gains = self._gains(size, requests)
        best, best_gain, least = 0, 1.0, 1.0 + self.spec.margin
        for place, (gain, error, _) in enumerate(gains):
            held = place == self._held
            if not place or gain is None or gain * (1 - self.spec.sureness * error) <= (1.0 if held else least):
                continue
            if gain > best_gain * (1.0 if held or best == 0 else 1.01):
                best, best_gain = place, gain
        probe = self._probe(best, best_gain, size, gains)
        if probe is not None:
            return Decision(self.arms[probe], True, gains[probe][0], best_gain)
        if best != self._held:
            if not best or not self._held:  # what was learnt about waiting belongs to the other side
                self._wait, self._next = {}, {}
            self._held = best
        return Decision(self.arms[best], False, best_gain, best_gain)

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Takes note of a dispatch's time and of what was accepted."""
        if not outcome.steps:
            return
        place, size = self.arms.index(decision.arm), bucket(outcome.rows)
        spent = self._times[place].setdefault(size, ArmTime())
        spent.add(outcome.time_s / outcome.steps, self.spec.memory)
        if len(outcome.touched) >= decision.length > 0:
            spent.touching(outcome.touched[decision.length - 1], self.spec.memory)
        self.touched.add(outcome.touched)
        for tried, accepted in outcome.accepted.items():
            self.survival.add(tried, accepted)
            self._counts[place].add(tried, accepted)
        self._steps += outcome.steps
        self._total_s += outcome.time_s + outcome.lost_s
        self._lost_s += outcome.lost_s
        if decision.probe:
            tokens_per_row = outcome.tokens / outcome.rows
            worth_s = tokens_per_row * self._plain_s(size) / decision.best
            self._lost_s += max(0.0, outcome.time_s - worth_s)
            group = self._group(place)
            if place and self._seen(place, size) < SEEN_TO_TRUST and self._gains(size, ())[place][2] > decision.best:
                return  # it may pay, and that is not known yet: only the budget bounds how soon it is tried again
            wait = self._wait.get(group, self.spec.shortest_wait)
            self._wait[group] = min(2 * wait, self.spec.longest_wait)
            self._next[group] = self._steps + wait

    def _group(self, place: int) -> int:
        """What waits together: plain decoding, all chains, each tree."""
        return min(place, 1) if place <= self._longest else place

    def _plain_s(self, size: int) -> float:
        """Time of a plain step, from the nearest number of rows at which it is known."""
        return self._times[0][_nearest(self._times[0], size)].mean_s

    def _gains(self, size: int, requests: Sequence[Survival]) -> list[tuple[float | None, float, float]]:
        """Predicted gain of each arm over plain decoding, its relative error, and what may be hoped for at most.

        A tree may be hoped to accept no less than chains do now, whatever it did when it ran.
        """
        theirs: list[tuple[float, float]] = []
        if requests:
            everyone = [survival for survival, _ in self.survival.by_position()]
            theirs = list(zip(mean_survival(requests, everyone), everyone, strict=True))
        chains, found = self._tokens(0, theirs), []
        for place, (ratio, ratio_error) in enumerate(self._ratios(size)):
            if ratio is None:
                found.append((None, math.inf, math.inf))
                continue
            floor, error = tokens, _ = chains[self._depths[place]]
            if place > self._longest:
                tokens, error = self._tokens(place, theirs)[-1]
            error = math.hypot(error / tokens, ratio_error)
            found.append((tokens / ratio, error, max(tokens, floor) / ratio * (1 + self.spec.sureness * error)))
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
        """What a calibration says of each chain's ratio."""
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

    def _probe(self, best: int, best_gain: float, size: int, gains: Sequence[tuple[Any, float, float]]) -> int | None:
        """An arm worth another look, where the budget allows one."""
        first_s = self.spec.first_steps * self._plain_s(size)
        if self._lost_s >= first_s + self.spec.probe_share * self._total_s:
            return None
        for place in range(self._longest, len(self.arms)):
            # The longest chain tells something about every position and every shorter one; trees are not told about.
            if sum(time.count for time in self._times[place].values()) < 2:
                return place
        if best and self._next.get(0, self.spec.shortest_wait) <= self._steps:
            return 0  # what plain decoding takes must stay known
        hopeful: list[tuple[float, int]] = []
        for place, (_, _, hope) in enumerate(gains):
            # Also a chain without hope: workloads change. It tells about trees, which then need not be run in vain.
            vain = place > self._longest and hope <= best_gain
            due = self._next.get(self._group(place), 0) + vain * self.spec.vain_wait
            if place not in (0, best) and due <= self._steps:
                hopeful.append((hope, place))
        return max(hopeful)[1] if hopeful else None


def _nearest(sizes: Collection[int], size: int) -> int:
    """Of some sizes the nearest one, of two the smaller."""
    return size if size in sizes else min(sizes, key=lambda s: (abs(s - size), s))


def bucket(rows: int) -> int:
    """Number of rows as a power of two: 1, 2, 3-4, 5-8, ... are 0, 1, 2, 3, ..."""
    return max(rows - 1, 0).bit_length()
