"""The control that measures: ``gain_k = tokens_k / r_k``, tokens per second over those of plain decoding.

An arm is used only if the lower bound of its gain is above 1 by a margin, so that drafting never costs, and left for
another one only if that one is better by the margin. The gain is Cascade's utility (2506.20675).
"""

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from jaxspec.control.acceptance import Acceptance
from jaxspec.control.decision import Decision, Outcome, Request, bucket
from jaxspec.control.explore import Gain, Trials
from jaxspec.control.sparse import DraftAvailability
from jaxspec.control.spec import ControlSpec
from jaxspec.control.step_time import StepTimes
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.topology import AnyTopology

TRUSTED = 4  # dispatches of an arm at a batch size, from which on its time counts as known


@dataclass
class Adaptive:
    """Chooses the arm that pays most, and plain decoding unless one pays for sure.

    Attributes:
      arms: plain decoding, chains by length, then trees.
      spec: how cautious it is.
      prior, overhead_s: of step times, see ``StepTimes``.
    """

    arms: tuple[AnyTopology, ...]
    spec: ControlSpec = field(default_factory=ControlSpec)
    prior: InitVar[StepRatios | None] = None
    overhead_s: InitVar[float] = 0.0
    times: StepTimes = field(init=False, compare=False, repr=False)
    acceptance: Acceptance = field(init=False, compare=False, repr=False)
    drafts: DraftAvailability = field(init=False, compare=False, repr=False)
    trials: Trials = field(init=False, compare=False, repr=False)

    def __post_init__(self, prior: StepRatios | None, overhead_s: float) -> None:
        self._chains = sum(arm.is_chain for arm in self.arms)
        self.times = StepTimes(self.arms, self.spec, prior, overhead_s)
        self.acceptance = Acceptance(self.arms, self.spec)
        self.drafts = DraftAvailability(self.spec.lookups)
        self.trials = Trials(self.spec, self._chains, self.times)
        self._held: dict[tuple[int, frozenset[Request]], int] = {}
        self._kept, self._kept_for, self._until = Decision(self.arms[0]), (-1, ()), 0.0

    def choose(self, rows: int, waiting: int, requests: Sequence[Request] = (), steps: int | None = None) -> Decision:
        """Decides about the next dispatch; one that will be short tries nothing, for it would tell little."""
        batch = rows, tuple(requests)
        if batch == self._kept_for and self.trials.steps < self._until:
            return self._kept
        if self.times.seen(0, rows) < 1.0:
            return Decision(self.arms[0])  # nothing can be compared until plain decoding ran for a whole dispatch
        gains = self.gains(rows, requests)
        kind = bucket(rows), frozenset(requests)
        held = self._held.get(kind, 0)
        best = self._best(gains, held)
        brief = steps is not None and steps < self.times.full
        trial = None if brief else self.trials.choose(best, gains, rows)
        best_gain = gains[best].value if best else 1.0
        if trial is not None:
            gain = gains[trial]
            # Verifies where it would pay if all drafts were accepted, or arms that never did would never be tried.
            share = self.drafts.best(bucket(rows), self.arms[trial].max_depth, gain.added)
            self._until = 0.0
            return Decision(self.arms[trial], True, gain.value or None, best_gain, share.min_rows(rows))
        if best != held:
            self.trials.reset(sides=not best or not held)
            if len(self._held) >= 1024:  # batches of many kinds and limits
                self._held.clear()
            self._held[kind] = best
        decision = Decision(self.arms[best], False, best_gain, best_gain, gains[best].verified.min_rows(rows))
        if not brief:
            self._kept, self._kept_for, done = decision, batch, self.trials.steps
            self._until = done + min(self.trials.uneven(self.spec.decide_every), done / 8)
        return decision

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learns from what came of a decision; one without a gain was not chosen here."""
        if not outcome.steps:
            return
        arm = self.arms.index(decision.arm)
        self.times.record(arm, outcome)
        self.acceptance.add(arm, outcome.accepted)
        self.drafts.record(bucket(outcome.rows), outcome.rows, outcome.rows_with_drafts)
        self.trials.record(arm, outcome, chosen=decision.gain is not None or decision.probe)
        if decision.probe:
            unknown = self.times.seen(arm, outcome.rows) < TRUSTED
            self.trials.record_trial(arm, self.gains(outcome.rows)[arm].upper if unknown else 0.0, decision, outcome)

    def gains(self, rows: int, requests: Sequence[Request] = ()) -> list[Gain]:
        """Returns the predicted gain of each arm, over steps with drafts and without."""
        ratio_A, error_A = self.times.ratios(rows)
        skipped, skipped_error = float(ratio_A[-1]), float(error_A[-1])
        chain_tokens, _ = self.acceptance.tokens(self._chains - 1, self.arms[self._chains - 1].max_depth, requests)
        gains = [Gain(1.0, 1.0, 1.0)]
        for arm, topology in enumerate(self.arms[1:], start=1):
            if not topology.is_chain and not self.times.seen(arm):
                gains.append(Gain(0.0, 0.0, math.inf))
                continue
            ratio, timing = float(ratio_A[arm]), float(error_A[arm])
            tokens, drafting = self.acceptance.tokens(arm, topology.max_depth, requests)
            share = self.drafts.best(bucket(rows), tokens - 1, ratio - skipped)
            # Times and tokens are those of steps, and of rows, with drafts; the other steps are plain.
            drafted, looking = share.steps * share.rows, (1 - share.steps) * skipped
            time, most = looking + share.steps * ratio, max(tokens, chain_tokens) if arm >= self._chains else tokens
            value = (1 + drafted * (tokens - 1)) / time
            drafting *= drafted / (1 + drafted * (tokens - 1))
            timing, looking = timing * share.steps * ratio / time, looking / time
            lower = value * (1 - self.spec.sureness * math.hypot(drafting, timing, skipped_error * looking))
            # A step that looks and finds no draft may take more than is known, but no less than a plain one.
            faster = math.hypot(drafting, timing, min(skipped_error, skipped - 1.0) * looking)
            upper = (1 + drafted * (most - 1)) / time * (1 + self.spec.sureness * faster)
            gains.append(Gain(value, lower, upper, share, ratio - skipped))
        return gains

    def _best(self, gains: Sequence[Gain], held: int) -> int:
        """Returns the arm to use: the one in use as long as it pays and no other is clearly better."""
        margin, best, least = self.spec.margin, 0, 1.0
        if held and gains[held].lower > 1.0:
            best, least = held, gains[held].to_replace(margin)
        for arm, gain in enumerate(gains[1:], start=1):
            if gain.lower > 1.0 + gain.verified.steps * margin and gain.value > least:
                best, least = arm, gain.value
        return best
