"""What the steps of every arm take, beside plain ones: measured while serving, and known beforehand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from jaxspec.perf.step_ratios import StepRatios
from jaxspec.serve.control import Outcome
from jaxspec.serve.normal import Normal
from jaxspec.serve.touched import TouchedExperts
from jaxspec.topology import AnyTopology

SEEN_TO_TRUST = 4  # dispatches of an arm before its time counts as known
GUESSED = 0.1  # relative error of a ratio of times taken from half or twice the rows
SLOPE, UNSURE = 0.25, 0.3  # of a plain step's time by rows, both as logarithms; and its error
ALIKE = 0.25  # relative error of what drafts add to a step, the same for all lengths, of what was known beforehand
ADDED, GUESS, EACH = 0.3, 1.0, 0.1  # what a draft adds to a step where nothing was known; its errors, shared and own
SKIPPED, SKIPPED_ERROR = 1.02, 0.03  # a step that drafts and verifies nothing, in plain ones, before it was measured
DRIFT = 0.015  # by which the machine's pace changes from one dispatch to the next
TEXT, TEXT_KEPT = 0.05, 0.98  # by which what drafts add differs from text to text; kept from dispatch to dispatch
NOISE, LEAST_NOISE, NOISE_OF = 0.04, 0.005, 64.0  # of a dispatch's time, to begin with and at least; dispatches
KEPT_ROWS = 24  # numbers of rows that are known at a time
BY_EXPERTS, BY_EXPERTS_ERROR = 0.3, 0.3  # by which a step's time grows with the experts touched, both as logarithms
SWITCHED, PROMPTED = 0.2, 1.0  # in plain steps, before they were measured: what a dispatch takes more behind one of
BEGUN_ERROR = 1.5  # another arm; what it takes besides its steps behind prompts; error of both, as logarithms
PACE, TEXTS, EXPERTS, SWITCH, PROMPT, FIRST = range(6)  # places of what is known, in logarithms


@dataclass
class StepTimes:
    """Times of whole dispatches on this machine, by arm and number of rows.

    Everything counts in them: drafting, the experts that a verification touches, the host. What is known of them is
    one joint normal law of logarithms (``Normal``): of the machine's pace now, which is that of a plain step; of how
    many times as long each arm's step takes; of how much more or less than usual drafts add on the texts of now; and of
    what dispatches take more behind another arm or behind prompts, for their code and tables are cold then. So
    one dispatch tells about the pace where its arm's time is known well, and about its arm where it is not; chains
    tell about each other, as numbers of rows do; and arms that have not run for long are known less well.

    Where a head predicts the target's routing, a chain's time is read at the experts that its next verification
    should touch.

    Attributes:
      arms: plain decoding, chains by length, then trees.
      memory: dispatches that are remembered of what an arm takes.
      prior: ratios of step times that a calibration measured, or warming up, for chains.
      overhead_s: what a dispatch takes besides its steps; short ones would look slow without it.
      full: steps of a full dispatch.
    """

    arms: tuple[AnyTopology, ...]
    memory: float = 200.0
    prior: StepRatios | None = None
    overhead_s: float = 0.0
    full: int = field(default=1, init=False)
    _known: Normal = field(init=False, repr=False, compare=False)
    _first: dict[int, int] = field(default_factory=dict, init=False)
    _seen: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    _touched: dict[int, TouchedExperts] = field(default_factory=dict, init=False)
    _usual: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    _law: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    _added_A: np.ndarray = field(init=False, repr=False, compare=False)
    _apart_AA: np.ndarray = field(init=False, repr=False, compare=False)
    _last: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._known = Normal(NOISE**2, LEAST_NOISE**2, NOISE_OF)
        self._known.add(
            np.array([0.0, 0.0, BY_EXPERTS, math.log(SWITCHED), math.log(PROMPTED)]),
            np.diag(np.square([1.0, TEXT, BY_EXPERTS_ERROR, BEGUN_ERROR, BEGUN_ERROR])),
        )

    def knows_plain(self, rows: int) -> bool:
        """Whether plain decoding ran with about as many rows (``bucket``), as long as a whole dispatch takes."""
        return self.seen(0, rows) >= 1.0

    def seen(self, place: int, rows: int | None = None) -> float:
        """Dispatches of an arm with about as many rows, or with any, in full ones."""
        if rows is None:
            return sum(count for (one, _), count in self._seen.items() if one == place)
        return self._seen.get((place, bucket(rows)), 0.0)

    def plain_s(self, rows: int) -> float:
        """Time of a plain step at the machine's pace of now."""
        first = self._of(rows)  # which may be new, and then lengthens what is known
        return math.exp(self._known.mean_N[PACE] + self._known.mean_N[first])

    def skipped(self, rows: int) -> tuple[float, float]:
        """Time of a step that drafts and then verifies nothing over that of a plain one, and its relative error.

        Never below 1.
        """
        first = self._of(rows)
        last, cov_NN = first + len(self.arms), self._known.cov_NN
        spread = cov_NN[last, last] - 2 * cov_NN[first, last] + cov_NN[first, first]
        return max(1.0, math.exp(self._known.mean_N[last] - self._known.mean_N[first])), math.sqrt(max(spread, 0.0))

    @property
    def ran_last(self) -> AnyTopology | None:
        """Arm of the last dispatch."""
        return None if self._last < 0 else self.arms[self._last]

    @property
    def switch_s(self) -> float:
        """What the first dispatch behind one of another arm takes more: its code and tables are cold."""
        return self._begins_s(SWITCH)

    def _begins_s(self, begins: int) -> float:
        """What a dispatch takes more to begin behind another arm, or behind prompts."""
        return math.exp(self._known.mean_N[begins] + self._known.mean_N[PACE])

    def took(self, place: int, outcome: Outcome) -> None:
        """Takes note of a dispatch's time, and of the experts that it should touch.

        Args:
          place: of its arm.
          outcome: what it did, in at least one step; of several dispatches if it has more steps than a full one.
        """
        known, steps, parts = self._known, outcome.steps, outcome.steps / self.full
        short_s = 0.0 if outcome.read else self.overhead_s * max(0.0, 1 - parts)
        rows = max(1, round(outcome.active or outcome.rows))
        if self._last < 0:
            known.mean_N[PACE] = math.log(
                max(outcome.time_s - short_s, 0.5 * outcome.time_s) / (steps + PROMPTED * outcome.read)
            )
        first, drafts, gone, at = self._of(rows), self.arms[place].max_depth, max(1.0, parts), near_alike(rows)
        self._first[at] = self._first.pop(at)  # the latest
        known.blur(PACE, PACE + 1, gone * DRIFT**2)
        known.blur(FIRST, None, gone * known.noise / self.memory**2)
        known.fade(TEXTS, TEXT_KEPT**gone, TEXT**2)
        law_AN = self._laws(first)
        kinds = [(steps - outcome.skipped, law_AN[place])]
        if outcome.touched and steps >= self.full:  # the step behind a prompt touches others than those that follow
            self._touched.setdefault(at, TouchedExperts(self.memory)).add(outcome.touched)
        if at in self._touched and outcome.touched:
            experts = outcome.touched[drafts - 1] if len(outcome.touched) >= drafts else None
            kinds[0] = steps - outcome.skipped, law_AN[place] + self._touching(at, place, experts)
        if outcome.skipped:
            kinds.append((outcome.skipped, law_AN[-1]))
        spent_s, by_N = short_s, np.zeros(law_AN.shape[1])
        for count, law_N in kinds:
            part_s = count * math.exp(law_N @ known.mean_N)
            spent_s, by_N = spent_s + part_s, by_N + part_s * law_N
        if outcome.read or self._last not in (place, -1):
            begins = PROMPT if outcome.read else SWITCH
            more_s = self._begins_s(begins)
            spent_s, by_N[PACE], by_N[begins] = spent_s + more_s, by_N[PACE] + more_s, more_s
            if outcome.read:  # a full dispatch's overhead counts as part of its steps
                spent_s -= min(self.overhead_s * min(1.0, parts), more_s)
        self._last = place
        known.measure(by_N / spent_s, math.log(max(outcome.time_s, 1e-9) / spent_s), parts)
        if steps > outcome.skipped:
            kind = place, bucket(rows)
            self._seen[kind] = self._seen.get(kind, 0.0) + (steps - outcome.skipped) / self.full

    def ratios(self, rows: int) -> list[tuple[float | None, float]]:
        """Time of each arm's step over that of a plain one, and its relative error; None for trees that never ran."""
        known, law_AN = self._known, self._laws(self._of(rows))
        by_AN = law_AN[:-1] - law_AN[0]
        at = near_alike(rows)
        if at in self._touched:
            by_AN += [self._touching(at, place, self._expected(at, arm)) for place, arm in enumerate(self.arms)]
        cov_AA = by_AN @ known.cov_NN @ by_AN.T
        spread_A = np.maximum(cov_AA.diagonal(), 0.0)
        self._apart_AA = np.sqrt(np.maximum(spread_A + spread_A[:, None] - 2 * cov_AA, 0.0))
        found = zip(np.exp(by_AN @ known.mean_N).tolist(), np.sqrt(spread_A).tolist(), self.arms, strict=True)
        return [
            (ratio, error) if arm.is_chain or self.seen(place) else (None, math.inf)
            for place, (ratio, error, arm) in enumerate(found)
        ]

    def apart(self, one: int, other: int) -> float:
        """Relative error of the ratio of two arms' times, where ``ratios`` was asked last."""
        return float(self._apart_AA[one, other])

    def _expected(self, rows: int, arm: AnyTopology) -> float | None:
        """Experts that its next verification should touch; of a tree none are told."""
        return self._touched[rows].at(arm.max_depth) if arm.drafts and arm.is_chain else None

    def _laws(self, first: int) -> np.ndarray:
        """By how much the logarithms of steps' times grow with what is known, of each arm and a skipped one, [A, N]."""
        if first not in self._law:
            self._law[first] = law_AN = np.zeros((len(self.arms) + 1, len(self._known.mean_N)))
            law_AN[:, PACE], law_AN[:, TEXTS] = 1.0, self._added_A
            np.fill_diagonal(law_AN[:, first:], 1.0)
        return self._law[first]

    def _touching(self, rows: int, place: int, experts: float | None) -> np.ndarray:
        """By how much that of an arm grows besides, with other experts than it touched first with so many rows, [N]."""
        by_N = np.zeros(len(self._known.mean_N))
        if experts:
            by_N[EXPERTS] = math.log(experts / self._usual.setdefault((rows, place), experts))
        return by_N

    def _of(self, rows: int) -> int:
        """Place of a plain step with so many rows; those of other arms follow, and a skipped one."""
        at = near_alike(rows)
        if at not in self._first:
            self._law.clear()
            self._first[at] = self._known_beforehand(at) if self._first else self._told_beforehand(at)
        return self._first[at]

    def _told_beforehand(self, rows: int) -> int:
        """Adds the first number of rows."""
        (told, own), shared = self._told(rows), GUESS if self.prior is None else ALIKE
        self._added_A = np.where([*(arm.is_chain for arm in self.arms), False], 1.0 - 1.0 / told, 0.0)
        return self._known.add(
            np.log(told), shared**2 * np.outer(self._added_A, self._added_A) + np.diag(np.square(own))
        )

    def _known_beforehand(self, rows: int) -> int:
        """Adds another number of rows, like the nearest known one."""
        near = min(self._first, key=lambda one: abs(math.log(one / rows)))
        away, count = math.log(rows / near), len(self.arms) + 1
        more = np.log(self._told(rows)[0] / self._told(near)[0]) + SLOPE * away
        cov_AA = (UNSURE * away) ** 2 + np.diag(np.full(count, (GUESSED * away) ** 2))
        first = self._known.add(more, cov_AA, self._first[near] + np.arange(count))
        if len(self._first) < KEPT_ROWS:
            return first
        gone = self._first.pop(next(iter(self._first)))  # what ran longest ago
        self._known.drop(gone, count)
        self._first = {one: at - count * (at > gone) for one, at in self._first.items()}
        return first - count

    def _told(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Ratio of each arm's time, and of a skipped step's, as known beforehand, and the error each has by itself."""
        found = [(1.0, 0.0)]
        for arm in self.arms[1:]:
            one = self.prior.at(arm.max_depth, rows) if self.prior and arm.is_chain else None
            if self.prior and one:
                found.append((one[0], self.prior.each * one[1]))
            else:
                found.append((1 + ADDED * arm.drafts, EACH if arm.is_chain and not self.prior else GUESS))
        told, own = zip(*found, (SKIPPED, SKIPPED_ERROR), strict=True)
        return np.array(told), np.array(own)


def near_alike(rows: int) -> int:
    """The number of rows that stands for those near it: four to each doubling, above eight."""
    return rows if rows <= 8 else round(2 ** (round(4 * math.log2(rows)) / 4))


def bucket(rows: int) -> int:
    """Number of rows as a power of two: 1, 2, 3-4, 5-8, ... are 0, 1, 2, 3, ..."""
    return max(rows - 1, 0).bit_length()
