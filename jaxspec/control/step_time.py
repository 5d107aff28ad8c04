"""What the steps of each arm take: ``log time = pace + log r_arm(rows) + text * added_arm``, one Kalman filter.

``pace`` is a plain step's time on this machine now and drifts; ``r`` is an arm's step over a plain one, linear between
powers of two of rows; ``added`` is the share of an arm's step that its drafts add, and ``text`` how much more than
usual they add on the texts of now. So a dispatch tells about the pace where its arm is known, about its arm where it
is not, and about other arms and batch sizes as far as they have errors in common.
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxspec.control.decision import Outcome, bucket
from jaxspec.control.spec import ControlSpec
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.topology import AnyTopology

PACE, TEXT, SWITCH, PROMPT = range(4)  # the first numbers that the filter knows, all logarithms


class Kalman:
    """Mean and covariance of numbers that measurements narrow down; the noise, a variance, is learned."""

    def __init__(self, noise: float, least_noise: float, memory: float, outlier: float):
        self.mean_N, self.cov_NN, self.noise = np.zeros(0), np.zeros((0, 0)), noise
        self._least, self._memory, self._outlier = least_noise, memory, outlier

    def add(self, mean_M: np.ndarray, cov_MM: np.ndarray, base_M: np.ndarray | None = None) -> int:
        """Adds numbers and returns the index of the first; with ``base_M`` they are differences from those numbers."""
        first = len(self.mean_N)
        map_NM = np.zeros((first, len(mean_M)))
        if base_M is not None:
            map_NM[base_M, np.arange(len(mean_M))] = 1.0
        across_NM = self.cov_NN @ map_NM
        self.cov_NN = np.block([[self.cov_NN, across_NM], [across_NM.T, map_NM.T @ across_NM + cov_MM]])
        self.mean_N = np.concatenate([self.mean_N, mean_M + self.mean_N @ map_NM])
        return first

    def measure(self, by_N: np.ndarray, surprise: float, weight: float) -> None:
        """Learns from measured minus expected of what has these derivatives; its noise is ``noise / weight``."""
        cov_N = self.cov_NN @ by_N
        known, noise = float(by_N @ cov_N), self.noise / weight
        spread = known + noise
        most = self._outlier * spread**0.5
        surprise = min(max(surprise, -most), most)
        if known < noise:  # else the surprise says more about the numbers than about the noise
            more = weight * (surprise * surprise - spread) / self._memory
            self.noise = max(self.noise + more, 0.5 * self.noise, self._least)
        gain_N = cov_N / spread
        self.mean_N += gain_N * surprise
        self.cov_NN -= np.outer(gain_N, cov_N)


class StepTimes:
    """Measured times of whole dispatches, drafting, experts and host included.

    Attributes:
      prior: ratios by a calibration, the cost model or warming up; None for a guess.
      overhead_s: what a dispatch takes besides its steps, so that short ones do not look slow.
      full: steps of a full dispatch.
    """

    def __init__(self, arms: Sequence[AnyTopology], spec: ControlSpec, prior: StepRatios | None, overhead_s: float):
        self.prior, self.overhead_s, self.full = prior, overhead_s, 1
        self._arms, self._spec, self._last = arms, spec, -1
        self._known = Kalman(spec.noise**2, (spec.noise / 8) ** 2, spec.noise_dispatches, spec.outlier)
        self._known.add(
            np.log([1.0, 1.0, spec.switch_steps, spec.prompt_steps]),
            np.diag(np.square([1.0, spec.text_spread, spec.cold_error, spec.cold_error])),
        )
        self._added_A = np.zeros(len(arms) + 1)
        self._knots: dict[int, int] = {}  # log2 of rows: index of the plain step's number; other arms' follow
        self._laws: dict[float, np.ndarray] = {}
        self._seen: dict[tuple[int, int], float] = {}

    def warm_up(self, measured: StepRatios, overhead_s: float) -> None:
        """Takes in what was measured before any request ran; a prior that was measured, too, stays as it is."""
        self.overhead_s = overhead_s
        self.prior = measured if self.prior is None else self.prior.corrected_by(measured)

    def seen(self, arm: int, rows: int | None = None) -> float:
        """Returns how many full dispatches of an arm ran with about so many rows, or with any."""
        size = None if rows is None else bucket(rows)
        return sum(n for (one, other), n in self._seen.items() if one == arm and size in (None, other))

    def plain_s(self, rows: int) -> float:
        """Returns the time of a plain step at the machine's pace of now."""
        return math.exp(self._law(rows)[0] @ self._known.mean_N)

    @property
    def switch_s(self) -> float:
        """Returns what the first dispatch of another arm takes more: its code and tables are cold."""
        return math.exp(self._known.mean_N[SWITCH] + self._known.mean_N[PACE])

    def ratios(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the time of each arm's step over a plain one, and its relative error, [arms + 1] each.

        The last entry is a step that drafts and verifies nothing, which never takes less than a plain one.
        """
        law_AN = self._law(rows)
        by_AN = law_AN - law_AN[0]
        variance_A = np.einsum("an,nm,am->a", by_AN, self._known.cov_NN, by_AN)
        ratio_A = np.exp(by_AN @ self._known.mean_N)
        ratio_A[-1] = max(ratio_A[-1], 1.0)
        return ratio_A, np.sqrt(np.maximum(variance_A, 0.0))

    def record(self, arm: int, outcome: Outcome) -> None:
        """Learns from a dispatch of at least one step."""
        known, spec, steps = self._known, self._spec, outcome.steps
        self.full = max(self.full, steps)
        parts = steps / self.full
        short_s = 0.0 if outcome.after_prompt else self.overhead_s * (1 - parts)
        if self._last < 0:
            first_s = max(outcome.time_s - short_s, 0.5 * outcome.time_s)
            known.mean_N[PACE] = math.log(first_s / (steps + spec.prompt_steps * outcome.after_prompt))
        law_AN = self._law(outcome.active or outcome.rows)
        self._pass_time()
        verified_s = (steps - outcome.skipped) * math.exp(law_AN[arm] @ known.mean_N)
        skipped_s = outcome.skipped * math.exp(law_AN[-1] @ known.mean_N)
        by_N = verified_s * law_AN[arm] + skipped_s * law_AN[-1]
        expected_s = short_s + verified_s + skipped_s
        if outcome.after_prompt or self._last not in (arm, -1):
            begins = PROMPT if outcome.after_prompt else SWITCH
            more_s = math.exp(known.mean_N[begins] + known.mean_N[PACE])
            by_N[[PACE, begins]] += more_s
            expected_s += more_s
            if outcome.after_prompt:  # a full dispatch's overhead counts as part of its steps
                expected_s -= min(self.overhead_s * parts, more_s)
        self._last = arm
        known.measure(by_N / expected_s, math.log(max(outcome.time_s, 1e-9) / expected_s), parts)
        kind = arm, bucket(outcome.rows)
        self._seen[kind] = self._seen.get(kind, 0.0) + (steps - outcome.skipped) / self.full

    def _pass_time(self) -> None:
        """Makes everything less sure by one dispatch."""
        known, spec = self._known, self._spec
        variance_N = np.einsum("ii->i", known.cov_NN)
        variance_N[PACE] += spec.pace_drift**2
        variance_N[PROMPT + 1 :] += known.noise / spec.dispatches**2
        kept = 1.0 - 1.0 / spec.text_dispatches
        known.mean_N[TEXT] *= kept
        known.cov_NN[TEXT] *= kept
        known.cov_NN[:, TEXT] *= kept
        variance_N[TEXT] += spec.text_spread**2 * (1.0 - kept * kept)

    def _law(self, rows: float) -> np.ndarray:
        """Returns the derivatives of the arms' log times by the filter's numbers, a skipped step's last, [A + 1, N]."""
        if rows not in self._laws:
            low, part = divmod(math.log2(rows), 1.0)
            knots = [(self._knot(int(low)), 1.0 - part)]
            if part:
                knots.append((self._knot(int(low) + 1), part))
            law_AN = np.zeros((len(self._arms) + 1, len(self._known.mean_N)))
            law_AN[:, PACE], law_AN[:, TEXT] = 1.0, self._added_A
            for first, share in knots:
                np.fill_diagonal(law_AN[:, first:], share)
            if len(self._laws) >= 64:
                self._laws.clear()
            self._laws[rows] = law_AN
        return self._laws[rows]

    def _knot(self, log_rows: int) -> int:
        """Returns the index of the numbers for a power of two of rows, new ones being like the nearest known ones."""
        if log_rows in self._knots:
            return self._knots[log_rows]
        spec, count = self._spec, len(self._arms) + 1
        prior_A, own_A = self._prior(2**log_rows)
        self._laws.clear()  # the filter grows
        if not self._knots:
            self._added_A = np.where([*(arm.is_chain for arm in self._arms), False], 1.0 - 1.0 / prior_A, 0.0)
            shared = spec.guess_error if self.prior is None else spec.prior_error
            cov_AA = shared**2 * np.outer(self._added_A, self._added_A) + np.diag(np.square(own_A))
            first = self._known.add(np.log(prior_A), cov_AA)
        else:
            near = min(self._knots, key=lambda one: abs(one - log_rows))
            away = (log_rows - near) * math.log(2)
            more_A = np.log(prior_A / self._prior(2**near)[0]) + spec.rows_slope * away
            cov_AA = (spec.rows_error * away) ** 2 * (1.0 + np.eye(count) / 9)
            first = self._known.add(more_A, cov_AA, self._knots[near] + np.arange(count))
        self._knots[log_rows] = first
        return first

    def _prior(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the expected ratio of each arm and of a skipped step, and the independent relative error of each."""
        spec, pairs = self._spec, [(1.0, 0.0)]
        for arm in self._arms[1:]:
            known = self.prior.at(arm.max_depth, rows) if self.prior and arm.is_chain else None
            if self.prior and known:
                pairs.append((known[0], self.prior.each * known[1]))
            else:
                own = 0.1 if arm.is_chain and not self.prior else 1.0
                pairs.append((1 + spec.guess_per_draft * arm.drafts, own * spec.guess_error))
        ratios, errors = zip(*pairs, (spec.skipped_ratio, 1.5 * (spec.skipped_ratio - 1.0)), strict=True)
        return np.array(ratios), np.array(errors)
