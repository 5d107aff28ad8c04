"""What drafts cost: ``step_s = c + token_s * drafts + expert_s * experts + depth_s * depth``; dear ones are pruned.

Least squares over the dispatches, each against the mean of those just before it that share its program and batch size:
a machine is now faster and now slower for many dispatches in a row, and against the mean of all, what changed when is
taken for what it cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from jaxspec.control.decision import Outcome, bucket

CONFIDENCE_STEPS = 16  # steps of confidence whose acceptance is counted apart
PARTS = ("token", "expert", "depth")
UNLIMITED = 1 << 20  # drafts


@dataclass(frozen=True)
class DraftCostSpec:
    """How the costs are learned."""

    first: int = 96  # dispatches that only learn: they take turns in ``trials``
    # Least product of confidences and share of the depth that are verified. What drafts, depth and experts cost shows
    # only where they do not always move together; and what is always pruned would never be seen again.
    trials: tuple[tuple[float, float], ...] = ((0.0, 1.0), (0.3, 1.0), (0.0, 1.0), (0.0, 0.5))
    trial_every: int = 16  # dispatches of which one is a trial afterwards
    dispatches: float = 512.0  # that the fit remembers
    neighbors: float = 2.0  # dispatches whose mean the next one is compared with, older ones fading out
    drafts: float = 8192.0  # that acceptance remembers, of greedy and of sampling rows each
    recent: float = 8.0  # dispatches over which the rate of tokens is taken


class StepCostFit:
    """Seconds per draft, expert, depth and dispatch, by least squares."""

    def __init__(self, spec: DraftCostSpec):
        self._spec = spec
        self._means: dict[tuple[int, int], tuple[float, np.ndarray]] = {}
        self._moments = np.zeros((len(PARTS) + 2,) * 2)

    def add(self, group: tuple[int, int], regressors: Sequence[float], step_s: float) -> None:
        """Counts a dispatch; a time that doubled or halved is the machine's doing, and the mean begins anew."""
        new = np.asarray([*regressors, step_s])
        count, mean = self._means.get(group, (0.0, new))
        if not 0.5 <= step_s / mean[-1] <= 2:
            count, mean = 0.0, new
        count = min(count + 1, self._spec.neighbors)
        away = new - mean
        self._means[group] = (count, mean + away / count)
        self._moments = (1 - 1 / self._spec.dispatches) * self._moments + (1 - 1 / count) * np.outer(away, away)

    def slopes(self) -> np.ndarray:
        """Returns the seconds per unit of each regressor, none below 0."""
        diagonal = np.diag(self._moments)[:-1]
        spread = self._moments[:-1, :-1] + 0.03 * np.diag(diagonal)  # a ridge splits what always moves together
        moving, slopes = np.flatnonzero(diagonal > 0), np.zeros(len(diagonal))
        if len(moving):
            root = np.linalg.cholesky(spread[np.ix_(moving, moving)])
            slopes[moving] = scipy.optimize.nnls(root.T, np.linalg.solve(root, self._moments[:-1, -1][moving]))[0]
        return slopes


class VerifyBudget:
    """Sets the costs of drafts from what earlier dispatches took and committed; nothing costs until that is known."""

    def __init__(
        self, experts: int, top_k: int, *, by_cost: bool = True, min_confidence: float = 0.0,
        spec: DraftCostSpec | None = None,
    ):  # fmt: skip
        """Knows nothing yet of a target of so many experts E (0 for a dense one) and A; prunes what is asked for."""
        self.by_cost, self.min_confidence, self.spec = by_cost, min_confidence, spec or DraftCostSpec()
        self.prices_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._experts, self._top_k = experts, top_k
        self._tried_MC, self._hits_MC = np.zeros((2, 2, CONFIDENCE_STEPS))
        self._fit = StepCostFit(self.spec)
        self._rates: dict[int, tuple[float, float]] = {}
        self._dispatches = 0

    def prices(self, length: int, rows: int) -> dict[str, Any]:
        """Returns the fields of ``protocol.DraftCosts`` for a speculation length and so many active rows."""
        tokens, time_s = self._rates.get(bucket(rows), (0.0, 0.0))
        trial, least, depth = self._trial(), self.min_confidence, 1.0
        if trial is not None:
            confidence, depth = trial
            least = max(least, confidence)
        values: dict[str, Any] = {
            "tok_per_s": tokens / time_s if time_s > 0 and trial is None else 0.0, "rows": rows,
            "min_confidence": least, "max_drafts": math.ceil(depth * length) if depth < 1 else UNLIMITED,
            # Two accepted drafts are assumed of each step of confidence, so that nothing is pruned on a guess.
            "accept_MC": (self._hits_MC + 2.0) / (self._tried_MC + 2.0),
            **{f"{part}_s": self.prices_s[part] for part in PARTS},
        }  # fmt: skip
        arrays = {name: np.asarray(value, np.float32) for name, value in values.items()}
        return {**arrays, "experts": self._experts, "top_k": self._top_k}

    def _trial(self) -> tuple[float, float] | None:
        """Returns the trial that the next dispatch is, if it is one."""
        first, every, done = self.spec.first, self.spec.trial_every, self._dispatches
        if not self.by_cost or (done >= first and done % every):
            return None
        return self.spec.trials[(done if done < first else done // every) % len(self.spec.trials)]

    def record(self, length: int, outcome: Outcome, outcome_HMC: np.ndarray) -> None:
        """Learns from a dispatch of a speculation length, and from what came of its drafts by confidence."""
        if not outcome.steps or not self.by_cost:
            return
        self._dispatches += 1
        tried_MC, hits_MC = outcome_HMC
        total_M1 = (self._tried_MC + tried_MC).sum(axis=1, keepdims=True)
        kept_M1 = np.minimum(1.0, self.spec.drafts / np.maximum(total_M1, 1.0))
        self._tried_MC, self._hits_MC = self._tried_MC * kept_M1 + tried_MC, self._hits_MC * kept_M1 + hits_MC
        size, kept = bucket(outcome.rows), 1 - 1 / self.spec.recent
        tokens, time_s = self._rates.get(size, (0.0, 0.0))
        self._rates[size] = (kept * tokens + outcome.tokens, kept * time_s + outcome.time_s)
        regressors = (outcome.drafted, self._added_experts(outcome), outcome.depth, 1 / outcome.steps)
        self._fit.add((length, size), regressors, outcome.time_s / outcome.steps)
        if self._dispatches >= self.spec.first and self._dispatches % self.spec.recent == 0:
            self.prices_s = dict(zip(PARTS, self._fit.slopes().tolist(), strict=False))

    def _added_experts(self, outcome: Outcome) -> float:
        """Returns the experts per layer that drafts alone touched, as predicted or by independent routing."""
        miss = 1 - self._top_k / max(self._experts, 1)
        if outcome.touched:
            return outcome.touched[-1] * miss**outcome.rows
        return self._experts * miss**outcome.rows * (1 - miss**outcome.drafted)
