"""The control that measures while it serves, so that drafting never costs: ``num_speculative_tokens: "auto"``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import repeat

from jaxspec.draft.speculation_schedule import SpeculationSchedule
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.serve.control import ByBatchSize, Control, Decision, Fixed, Outcome
from jaxspec.serve.found import ALL, FoundDrafts, Verified
from jaxspec.serve.probes import NO_GAIN, AdaptiveSpec, Gain, Probes
from jaxspec.serve.step_times import SEEN_TO_TRUST, StepTimes, bucket
from jaxspec.serve.survival import RequestSurvival, Survival
from jaxspec.serve.together import together
from jaxspec.serve.walks import Walks
from jaxspec.topology import AnyTopology, chain

MOVED = 0.2  # share by which the experts that drafts should touch differ from those of before: worth another thought

UNSEEN = 64  # most dispatches that are put off


def control_of(lengths: SpeculationSchedule, prior: StepRatios | None = None, from_tokens: bool = False) -> Control:
    """The control that a ``speculative_config`` asks for.

    Args:
      lengths: that may be drafted.
      prior: what a calibration measured beforehand.
      from_tokens: whether drafts depend on the tokens before them and on nothing else.
    """
    if lengths.adaptive:
        chains = [chain(length) for length in range(lengths.topology.max_depth + 1)]
        return Adaptive((*chains, *lengths.trees), prior=prior, from_tokens=from_tokens)
    return Fixed(lengths.topology) if lengths.ranges is None else ByBatchSize(lengths.ranges, lengths.otherwise)


Size = tuple[int, tuple[tuple[int, int], ...]]  # number of rows, and their kinds

NOTHING_READY = (-1, ()), 0, None


@dataclass
class Kept:
    """A decision that is not thought over again before so many steps, while requests have such limits of their own.

    ``late`` once it is older, and was of use nevertheless.
    """

    decision: Decision
    verified: Verified
    limits: Sequence[int]
    until: float
    late: bool = False

    def holds(self, limits: Sequence[int], steps: int, may_wait: bool) -> bool:
        """Whether it is of use for requests of these limits; an old one that may wait is for one dispatch more."""
        if limits != self.limits or steps < self.until:
            return limits == self.limits
        was_late, self.late = self.late, True
        return may_wait and not was_late

    def of(self, rows: int) -> Decision:
        """The decision, for so many rows."""
        least = self.verified.least(rows)
        return self.decision if self.decision.least == least else replace(self.decision, least=least)


@dataclass
class Adaptive:
    """Chooses the arm that pays most, and plain decoding unless one pays for sure (do no harm).

    The gain of an arm is the tokens that it commits per step, over the ratio of its step's time to that of a plain
    step: Cascade's utility (2506.20675). Chains tell about each other (``Walks``). A tree knows its own: its tokens are
    what its own depths accepted, with the longest chain's survival standing in for few verifications (a full tree
    holds the chain, so it should not accept less).

    Where a drafter often finds nothing, steps in which too few rows have a draft to be worth a verification are plain
    steps but for the time to draft: what an arm takes and brings is that of the others, and of rows that have a draft,
    and both are thinned by their shares before arms are compared.

    It thinks while the device works, as far as it can. A decision that has become old holds for one dispatch more, and
    is thought over meanwhile, where other rows than before are active or a trial ran; the latest one for as
    many rows does for requests of other kinds. It does not where a head predicts that drafts will touch other experts.

    Attributes:
      arms: plain decoding, chains by length, then trees.
      spec: how cautious it is.
      times: of the arms' steps; ``prior`` and ``overhead_s`` are what it starts from.
      from_tokens: whether drafts depend on the tokens before them and on nothing else.
      probes: what is tried besides.
      found: how many rows have drafts.
      survival: of drafts of all arms, to compare requests with.
    """

    arms: tuple[AnyTopology, ...]
    spec: AdaptiveSpec = field(default_factory=AdaptiveSpec)
    prior: InitVar[StepRatios | None] = None
    overhead_s: InitVar[float] = 0.0
    from_tokens: bool = False
    times: StepTimes = field(init=False)
    probes: Probes = field(init=False)
    found: FoundDrafts = field(init=False)
    survival: Survival = field(init=False)
    _chains: int = field(init=False)
    _walks: Walks = field(init=False, repr=False, compare=False)
    _counts: list[Survival] = field(init=False)
    _held: dict[Size, int] = field(default_factory=dict, init=False)
    _ready: tuple[Size, int, Decision | None] = field(default=NOTHING_READY, init=False)
    _last: Size = field(default=NOTHING_READY[0], init=False)
    _may_wait: bool = field(default=False, init=False)
    _steps: int = field(default=0, init=False)
    _kept: dict[Size, Kept] = field(default_factory=dict, init=False)
    _latest: dict[int, Kept] = field(default_factory=dict, init=False)
    _experts: dict[int, float] = field(default_factory=dict, init=False)
    _new: list[tuple[Decision, Outcome]] = field(default_factory=list, init=False)

    def __post_init__(self, prior: StepRatios | None, overhead_s: float) -> None:
        memory, deepest = self.spec.verifications, max(arm.max_depth for arm in self.arms)
        self._chains = sum(arm.is_chain for arm in self.arms)
        self.times = StepTimes(self.arms, self.spec.memory, prior, overhead_s)
        self.probes = Probes(self.spec, self._chains, self.times)
        self.found = FoundDrafts(self.spec.lookups)
        self.survival = Survival(deepest, memory)
        self._walks = Walks(self.arms[self._chains - 1].max_depth, deepest, memory, self.from_tokens)
        self._counts = [
            self._walks.counts[arm.max_depth] if arm.is_chain else Survival(arm.max_depth, memory) for arm in self.arms
        ]

    def choose(
        self, rows: int, waiting: int, requests: RequestSurvival | None = None, steps: int | None = None
    ) -> Decision:
        """Arm of the next dispatch for these active rows; ``requests`` has what is known of each."""
        size, limits = _size(rows, requests), [] if requests is None else requests.limits
        brief = steps is not None and steps < self.times.full  # most of its time would say nothing about the arm
        if size not in self._kept and size[0] in self._latest:
            self._kept[size] = replace(self._latest[size[0]], limits=limits, until=0, late=False)
        kept, (for_size, until, ready) = self._kept.get(size), self._ready
        may_wait, self._last, self._may_wait = self._may_wait or size != self._last, size, False
        chosen = None
        if ready is not None and not brief:
            self._ready = NOTHING_READY
            chosen = ready if for_size == size and self._steps < until else None
        if chosen is None and kept is not None and (brief or kept.holds(limits, self._steps, may_wait)):
            self._latest[size[0]] = kept
            return kept.of(rows)
        chosen = chosen or self._think(rows, requests, brief)
        if chosen.probe and kept is not None:
            kept.late = False  # it was thought over, and is of use behind the trial
        return chosen

    def ahead(self, decision: Decision, rows: int, requests: RequestSurvival | None = None) -> None:
        """Thinks while a dispatch runs, where the next one would have to wait for a thought.

        Not while requests run that want no drafts: what is best for them is of no use to those that follow.
        """
        size = _size(rows, requests)
        kept = self._kept.get(size)
        if decision.probe or len(self._new) >= UNSEEN:  # requests that want no drafts ask for no choice
            self.learn()  # what came of a probe is then all that is left to learn
        if kept is None or decision.probe or decision.gain is None or self._steps + self.times.full < kept.until:
            return
        chosen = self._think(rows, requests)
        if chosen.probe:
            self._ready = size, self._steps + 2 * self.times.full, chosen

    def _think(self, rows: int, requests: RequestSurvival | None, brief: bool = False) -> Decision:
        """Learns what there is to learn and weighs the arms, where plain decoding is known."""
        size, limits = _size(rows, requests), [] if requests is None else requests.limits
        if self.times.knows_plain(rows) or (self.arms[0], size[0]) in self._ran():
            self.learn()  # else to no end: texts end with few rows, for a few steps
        if not self.times.knows_plain(rows):
            return Decision(self.arms[0])
        gains = self._gains(rows, requests)
        held = self._held.get(size, 0)
        best, best_gain = self._best(gains, held)
        probe = None if brief else self.probes.choose(best, best_gain, rows, gains)
        if probe is not None:
            # Where it would pay if all drafts were accepted; or those that never were would never be verified again.
            arm, gain = self.arms[probe], gains[probe]
            least = self.found.pays(size[0], arm.max_depth, gain.more).least(rows)
            return Decision(arm, True, gain.value or None, best_gain, least)
        if best != held:
            if not best or not held:
                self.probes.forget_waits()
            self._held[size] = best
        verified = gains[best].verified
        chosen = Decision(self.arms[best], False, best_gain, best_gain, verified.least(rows))
        if not brief:
            until = self._steps + min(self.probes.uneven(self.spec.thinking_steps), self._steps / 8)
            self._kept[size] = self._latest[size[0]] = Kept(chosen, verified, limits, until)
        return chosen

    def _ran(self) -> Iterator[tuple[AnyTopology, int]]:
        """Arms of the dispatches that were not looked at yet, with their numbers of rows (``bucket``)."""
        return ((decision.arm, bucket(outcome.rows)) for decision, outcome in self._new)

    def _best(self, gains: Sequence[Gain], held: int) -> tuple[int, float]:
        """The arm to use and its gain: the one in use as long as it pays and no other is clearly better."""
        held = held if gains[held].least > 1.0 else 0
        best, value = held, gains[held].value if held else 1.0
        least = self.spec.to_replace(gains[held]) if held else 0.0
        for place, gain in enumerate(gains[1:], start=1):
            if gain.least > 1.0 + gain.verified.share * self.spec.margin and gain.value > max(least, value):
                best, value = place, gain.value
        return best, value

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Takes note of a dispatch, which is looked at when there is something to choose."""
        if outcome.steps:
            self._new.append((decision, outcome))
            self.times.full = max(self.times.full, outcome.steps)
            self._steps += outcome.steps * (decision.gain is not None or decision.probe)
            self._may_wait = decision.probe
            if outcome.touched and outcome.steps >= self.times.full:
                experts, before = outcome.touched[0], self._experts.get(outcome.rows, 0.0)
                if abs(experts - before) > MOVED * before:
                    self._experts[outcome.rows] = experts
                    for (size, _), kept in self._kept.items():
                        if size == bucket(outcome.rows):
                            kept.until = 0.0

    def learn(self) -> None:
        """Looks at the dispatches since the last time."""
        for decision, outcome in together(self._new, self.times.full, self.times.ran_last):
            place, size = self.arms.index(decision.arm), bucket(outcome.rows)
            self.times.took(place, outcome)
            for tried, accepted in outcome.accepted.items():
                self.survival.add(tried, accepted)
                if place < self._chains:
                    self._walks.add(tried, accepted)
                else:
                    self._counts[place].add(tried, accepted)
            if outcome.found:
                drafts = self._tokens(place, decision.length, [])[0] - 1.0
                self.found.add(size, outcome.rows, outcome.found, drafts, decision.least)
            self.probes.ran(place, outcome, decision.gain is not None or decision.probe)
            if decision.probe:
                unknown = self.times.seen(place, outcome.rows) < SEEN_TO_TRUST
                hope = self._gains(outcome.rows)[place].hope if unknown else 0.0
                self.probes.learnt(place, hope, decision, outcome)
        self._new.clear()

    def _gains(self, rows: int, requests: RequestSurvival | None = None) -> list[Gain]:
        """Predicted gain of each arm over plain decoding, over steps with drafts and without."""
        theirs = [] if requests is None else requests.beside(self.survival)
        sureness, size, found = self.spec.sureness, bucket(rows), []
        skipped, unsure_of_it = self.times.skipped(rows)
        for place, (ratio, timing) in enumerate(self.times.ratios(rows)):
            if ratio is None:
                found.append(NO_GAIN)
                continue
            depth = self.arms[place].max_depth
            tokens, error = self._tokens(place, depth, theirs)
            floor = tokens if place < self._chains else self._tokens(self._chains - 1, depth, theirs)[0]
            # What is known is that of steps, and of rows, with drafts; the others commit what plain ones do.
            drafts, more = tokens - 1, ratio - skipped
            verified = self.found.pays(size, drafts, more) if place else ALL
            drafted, others = verified.share * verified.density, (1 - verified.share) * skipped
            tokens, floor, whole = (
                1 + drafted * drafts,
                1 + drafted * (floor - 1),
                others + verified.share * ratio,
            )
            drafting = drafted * error / tokens
            part = verified.share * ratio / whole
            value, timing, looking = tokens / whole, part * timing, others / whole
            # A step that looks and finds no draft may take more than is known, but no less than a plain one.
            faster = math.hypot(timing, min(unsure_of_it, skipped - 1.0) * looking)
            unsure = sureness * math.hypot(drafting, timing, unsure_of_it * looking)
            hope = max(tokens, floor) / whole * (1 + sureness * math.hypot(drafting, faster))
            found.append(Gain(value, faster, drafting, value * (1 - unsure), hope, verified, more, part))
        return found

    def _tokens(self, place: int, depth: int, theirs: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Expected tokens per step of an arm cut at a depth, the target's own included, and their standard error.

        Args:
          place: of the arm.
          depth: where it is cut.
          theirs: survival of the requests in question, and of everyone, over all arms; the arm's is taken to relate
            likewise. Empty for everyone.
        """
        tokens, error = 1.0, 0.0
        beside = self._counts[self._chains - 1] if place >= self._chains else None
        found_by = self._counts[place].by_position(beside)[:depth]
        for (survival, unsure), (own, every) in zip(found_by, theirs or repeat((1.0, 1.0)), strict=False):
            survival = survival * own / every if every else own
            tokens += survival if survival < 1.0 else 1.0
            error += unsure
        return tokens, error


def _size(rows: int, requests: RequestSurvival | None) -> Size:
    """What a decision is kept for."""
    return bucket(rows), () if requests is None else requests.shares
