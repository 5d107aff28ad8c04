"""Which speculation length the next dispatch uses: fixed, by batch size, or measured so that it never costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxspec.draft.lengths import Lengths
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.serve.survival import Survival
from jaxspec.serve.touched import TouchedExperts

SEEN_FOR_SLOPE = 12  # dispatches before a line through times and touched experts is trusted
SEEN_TO_TRUST = 4  # dispatches before what was measured while serving replaces a calibration
GUESSED = 0.1  # relative error of a ratio of times taken from another length, or from half or twice the rows


@dataclass(frozen=True)
class Decision:
    """What the next dispatch does.

    Attributes:
      length: K, 0 for plain decoding.
      probe: whether it is run to learn something and not because it is best.
      gain: predicted tokens per second over those of plain decoding, None where nothing is known yet.
      best: the gain of what it would have run without the probe.
    """

    length: int
    probe: bool = False
    gain: float | None = None
    best: float = 1.0


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
    """Chooses among lengths that were compiled beforehand."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The arms, ascending."""
        ...

    def choose(self, rows: int, waiting: int, requests: Sequence[Survival] = ()) -> Decision:
        """Length of the next dispatch for this many active rows and waiting requests."""
        ...

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Takes note of what came of a decision."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same length."""

    length: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """The one arm."""
        return (self.length,)

    def choose(self, rows: int, waiting: int, requests: Sequence[Survival] = ()) -> Decision:
        """Length of the next dispatch."""
        return Decision(self.length)

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class ByBatchSize:
    """A length for each range of batch sizes, as of vLLM's ``num_speculative_tokens_per_batch_size``.

    Attributes:
      ranges: lowest and highest number of requests, running and waiting, and the length for them.
      otherwise: the length outside of all ranges.
    """

    ranges: tuple[tuple[int, int, int], ...]
    otherwise: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """The arms, ascending."""
        return tuple(sorted({self.otherwise, *(k for _, _, k in self.ranges)}))

    def choose(self, rows: int, waiting: int, requests: Sequence[Survival] = ()) -> Decision:
        """Length of the next dispatch."""
        size = rows + waiting
        return Decision(next((k for low, high, k in self.ranges if low <= size <= high), self.otherwise))

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learns nothing."""


def control_of(lengths: Lengths, prior: StepRatios | None = None) -> Control:
    """The control that a ``speculative_config`` asks for; a prior is what a calibration measured beforehand."""
    longest = lengths.topology.max_depth
    if lengths.adaptive:
        return Adaptive(tuple(range(longest + 1)), prior=prior)
    return Fixed(longest) if lengths.ranges is None else ByBatchSize(lengths.ranges, lengths.otherwise)


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
    """

    margin: float = 0.02
    sureness: float = 1.64
    probe_share: float = 0.02
    first_steps: int = 24
    memory: float = 400.0
    shortest_wait: int = 64
    longest_wait: int = 4096


@dataclass
class _Time:
    """Running mean and variance of the time of a step, in seconds, forgetting old dispatches.

    Attributes:
      mean_s, square, count: of the times.
      last_s: the latest of them.
      experts, spread, together: mean and variance of the experts that steps were predicted to touch, and covariance
        with their times.
    """

    mean_s: float = 0.0
    square: float = 0.0
    count: float = 0.0
    last_s: float = 0.0
    experts: float = 0.0
    spread: float = 0.0
    together: float = 0.0

    def add(self, step_s: float, memory: float) -> None:
        self.count = min(self.count + 1.0, memory)
        share = 1.0 / self.count
        self.last_s, delta = step_s, step_s - self.mean_s
        self.mean_s += share * delta
        self.square += share * (delta * delta * (1 - share) - self.square)

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

    @property
    def error(self) -> float:
        """Relative standard error; a single measurement may be off by half."""
        if self.count < 2:
            return 0.5
        return math.sqrt(self.square / self.count) / self.mean_s


@dataclass
class Adaptive:
    """Chooses the length that pays most, and plain decoding unless one pays for sure (do no harm).

    The gain of a length is the tokens that it commits per step, over the ratio of its step's time to that of a plain
    step: Cascade's utility (2506.20675). Times are those of whole dispatches on this machine, by number of rows, so
    everything counts: drafting, the experts that a verification touches, the host. Where a head predicts the target's
    routing, a length's time is read at the experts that its next verification should touch. Probes are bounded by a
    share of all steps, and rejected arms wait twice as long each time.

    Attributes:
      lengths: the arms, 0 among them, ascending.
      spec: how cautious it is.
      prior: ratios of step times that a calibration measured, for what was not run often enough yet.
      survival: of drafted positions, over all requests.
      touched: experts that verifications should touch, where a head predicts them.
    """

    lengths: tuple[int, ...]
    spec: AdaptiveSpec = field(default_factory=AdaptiveSpec)
    prior: StepRatios | None = None
    survival: Survival = field(init=False)
    touched: TouchedExperts = field(init=False)
    _times: dict[tuple[int, int], _Time] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _total_s: float = field(default=0.0, init=False)
    _lost_s: float = field(default=0.0, init=False)
    _wait: dict[bool, int] = field(default_factory=dict, init=False)
    _next: dict[bool, int] = field(default_factory=dict, init=False)
    _held: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.survival = Survival(max(self.lengths), self.spec.memory)
        self.touched = TouchedExperts(self.spec.memory)

    def choose(self, rows: int, waiting: int, requests: Sequence[Survival] = ()) -> Decision:
        """Length of the next dispatch for these active rows; ``requests`` hold what is known of each."""
        size = bucket(rows)
        if (0, size) not in self._times:
            return Decision(0)
        best, best_gain, least = 0, 1.0, 1.0 + self.spec.margin
        for length in self.lengths[1:]:
            gain, error = self._gain(length, size, requests)
            held = length == self._held
            if gain is None or gain * (1 - self.spec.sureness * error) <= (1.0 if held else least):
                continue
            if gain > best_gain * (1.0 if held or best == 0 else 1.01):
                best, best_gain = length, gain
        probe = self._probe(best, size, requests)
        if probe is not None:
            return Decision(probe, True, self._gain(probe, size, requests)[0], best_gain)
        if best != self._held:
            if not best or not self._held:  # what was learnt about waiting belongs to the other side
                self._wait, self._next = {}, {}
            self._held = best
        return Decision(best, False, best_gain, best_gain)

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Takes note of a dispatch's time and of what was accepted."""
        if not outcome.steps:
            return
        key = (decision.length, bucket(outcome.rows))
        spent = self._times.setdefault(key, _Time())
        spent.add(outcome.time_s / outcome.steps, self.spec.memory)
        if len(outcome.touched) >= decision.length > 0:
            spent.touching(outcome.touched[decision.length - 1], self.spec.memory)
        self.touched.add(outcome.touched)
        for tried, accepted in outcome.accepted.items():
            self.survival.add(tried, accepted)
        self._steps += outcome.steps
        self._total_s += outcome.time_s + outcome.lost_s
        self._lost_s += outcome.lost_s
        if decision.probe:
            tokens_per_row = outcome.tokens / outcome.rows
            worth_s = tokens_per_row * self._plain_s(key[1]) / decision.best
            self._lost_s += max(0.0, outcome.time_s - worth_s)
            drafts = decision.length > 0
            wait = self._wait.get(drafts, self.spec.shortest_wait)
            self._wait[drafts] = min(2 * wait, self.spec.longest_wait)
            self._next[drafts] = self._steps + wait

    def _plain_s(self, size: int) -> float:
        """Time of a plain step, from the nearest number of rows at which it is known."""
        return self._times[0, min((s for k, s in self._times if k == 0), key=lambda s: (abs(s - size), s))].mean_s

    def _gain(self, length: int, size: int, requests: Sequence[Survival]) -> tuple[float | None, float]:
        """Predicted gain of a length over plain decoding and its relative error; None where no time is known."""
        ratio, ratio_error = self._ratio(length, size)
        if ratio is None:
            return None, math.inf
        tokens, error = self.survival.acceptance_length(length)
        if requests:
            tokens = sum(r.acceptance_length(length, beside=self.survival)[0] for r in requests) / len(requests)
        return tokens / ratio, math.hypot(error / tokens, ratio_error)

    def _ratio(self, length: int, size: int) -> tuple[float | None, float]:
        """Time of a step over that of a plain one, where need be from the lengths around; None beyond all known."""
        known = {0: (1.0, 0.0)} | {k: r for k in self.lengths[1:] if (r := self._measured(k, size)) is not None}
        told = None if self.prior is None else self.prior.at(length, 2**size)
        if told is not None and min(self._seen(length, size), self._seen(0, size)) < SEEN_TO_TRUST:
            return told
        if length in known:
            return known[length]
        above = min((k for k in known if k > length), default=None)
        if above is None:
            return None, math.inf
        below = max(k for k in known if k < length)
        share = (length - below) / (above - below)
        ratio = known[below][0] + share * (known[above][0] - known[below][0])
        return ratio, known[above][1] + GUESSED

    def _seen(self, length: int, size: int) -> float:
        """Dispatches of a length with this number of rows."""
        return self._times[length, size].count if (length, size) in self._times else 0.0

    def _measured(self, length: int, size: int) -> tuple[float, float] | None:
        """Measured ratio of times and its relative error, from the nearest number of rows at which both are known."""
        sizes = [s for (k, s) in self._times if k == length and (0, s) in self._times]
        if not sizes:
            return None
        near = min(sizes, key=lambda s: (abs(s - size), s))
        arm, plain = self._times[length, near], self._times[0, near]
        return self._time_s(length, near) / plain.mean_s, math.hypot(arm.error, plain.error) + GUESSED * abs(
            near - size
        )

    def _time_s(self, length: int, size: int) -> float:
        """Time of a length's step at the experts that it should touch next."""
        arm, experts = self._times[length, size], self.touched.at(length)
        return arm.mean_s if experts is None else arm.with_experts(experts)

    def _probe(self, best: int, size: int, requests: Sequence[Survival]) -> int | None:
        """An arm worth another look, where the budget allows one."""
        first_s = self.spec.first_steps * self._plain_s(size)
        if self._lost_s >= first_s + self.spec.probe_share * self._total_s:
            return None
        longest = self.lengths[-1]
        if sum(t.count for (k, _), t in self._times.items() if k == longest) < 2:
            return longest  # it tells something about every position and every shorter length
        if best and self._next.get(False, self.spec.shortest_wait) <= self._steps:
            return 0  # what plain decoding takes must stay known
        if self._steps < self._next.get(True, 0):
            return None
        hopeful: list[tuple[float, int]] = []
        for length in self.lengths[1:]:
            gain, error = self._gain(length, size, requests)
            hope = math.inf if gain is None else gain * (1 + self.spec.sureness * error)
            if length != best:
                hopeful.append((hope, length))  # also one without hope: workloads change
        return max(hopeful)[1] if hopeful else None


def bucket(rows: int) -> int:
    """Number of rows as a power of two: 1, 2, 3-4, 5-8, ... are 0, 1, 2, 3, ..."""
    return max(rows - 1, 0).bit_length()
