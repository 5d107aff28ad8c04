"""What drafts cost and are worth on this machine, measured while serving, so that those that do not pay are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.optimize import nnls

from jaxspec.draft.draft_pruning import PruningConfig
from jaxspec.models.arch import ArchSpec, chosen_of, experts_of
from jaxspec.protocol import DraftCosts
from jaxspec.serve.control import Outcome
from jaxspec.serve.step_times import bucket

CONFIDENCE_STEPS = 16
PARTS = ("token", "expert", "depth")
RIDGE = 0.03  # of each regressor's variance: splits what regressors that always move together explain
UNLIMITED = 1 << 20  # drafts
PRIOR = 2.0  # accepted drafts that every step of confidence starts with, so that nothing is cut on a guess


@dataclass(frozen=True)
class BudgetSpec:
    """How a budget learns.

    Attributes:
      first: dispatches that only learn: they take turns in ``trials``.
      trials: least product of confidences and share of the depth that are verified. What drafts, depth and experts cost
        shows only where they do not always move together; and what is always cut would never be seen again.
      try_every: afterwards one of so many dispatches is a trial.
      memory, beside: of ``StepTimes``.
      tried: drafts that acceptance remembers, of greedy and of sampling rows each.
      recent: dispatches over which the rate is taken.
    """

    first: int = 96
    trials: tuple[tuple[float, float], ...] = ((0.0, 1.0), (0.3, 1.0), (0.0, 1.0), (0.0, 0.5))
    try_every: int = 16
    memory: float = 512.0
    beside: float = 2.0
    tried: float = 8192.0
    recent: float = 8.0


@dataclass
class StepTimes:
    """Least squares of step times, each beside those just before it that share its program and number of rows.

    A machine is now faster and now slower for many dispatches in a row: beside the mean of all, what changed when is
    taken for what it cost.

    Attributes:
      memory: dispatches that are remembered.
      beside: dispatches whose mean the next one is compared with, older ones fading out.
    """

    memory: float
    beside: float
    _means: dict[tuple[int, int], tuple[float, np.ndarray]] = field(default_factory=dict)
    _moments: np.ndarray = field(default_factory=lambda: np.zeros((len(PARTS) + 2,) * 2))

    def add(self, group: tuple[int, int], regressors: Sequence[float], step_s: float) -> None:
        """Takes note of a dispatch; where time doubled or halved, that is the machine's doing, and all begins anew."""
        new = np.asarray([*regressors, step_s])
        count, mean = self._means.get(group, (0.0, new))
        if not 0.5 <= step_s / mean[-1] <= 2:
            count, mean = 0.0, new
        count = min(count + 1, self.beside)
        away = new - mean
        self._means[group] = (count, mean + away / count)
        self._moments = (1 - 1 / self.memory) * self._moments + (1 - 1 / count) * np.outer(away, away)

    def slopes(self) -> np.ndarray:
        """Seconds per unit of each regressor, none below 0."""
        spread = self._moments[:-1, :-1] + RIDGE * np.diag(np.diag(self._moments)[:-1])
        moving = np.flatnonzero(np.diag(spread) > 0)
        found = np.zeros(len(spread))
        if len(moving):
            root = np.linalg.cholesky(spread[np.ix_(moving, moving)])
            found[moving] = nnls(root.T, np.linalg.solve(root, self._moments[:-1, -1][moving]))[0]
        return found


class VerifyBudget:
    """Sets the prices of drafts before each dispatch, from what the dispatches before it took and committed.

    The time of a step is explained by the drafts that were verified, the experts that these should touch (as the head
    predicts, else as if routing were independent) and the depth that was drafted; the estimated acceptance of a
    confidence is what was accepted of such drafts. Until enough has been seen nothing has a price.
    """

    def __init__(self, pruning: PruningConfig, experts: int, top_k: int, spec: BudgetSpec | None = None):
        """Starts without any knowledge.

        Args:
          pruning: what is wanted.
          experts: E of the target, 0 for a dense one.
          top_k: A.
          spec: how it learns.
        """
        self.pruning, self.experts, self.top_k, self.spec = pruning, experts, top_k, spec or BudgetSpec()
        self._tried_MC, self._hits_MC = np.zeros((2, 2, CONFIDENCE_STEPS))
        self._times = StepTimes(self.spec.memory, self.spec.beside)
        self._rates: dict[int, tuple[float, float]] = {}
        self._dispatches = 0
        self.prices_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def prices(self, length: int, rows: int) -> DraftCosts:
        """DraftCosts of the next dispatch, for a speculation length and so many active rows."""
        tokens, time_s = self._rates.get(bucket(rows), (0.0, 0.0))
        trial, least, share = self._trial(), self.pruning.min_confidence, 1.0
        if trial is not None:
            wanted, share = self.spec.trials[trial]
            least = max(least, wanted)
        known = time_s > 0 and trial is None
        values: dict[str, Any] = {
            "tok_per_s": tokens / time_s if known else 0.0, "rows": rows,
            "min_confidence": least, "max_drafts": math.ceil(share * length) if share < 1 else UNLIMITED,
            "accept_MC": (self._hits_MC + PRIOR) / (self._tried_MC + PRIOR),
            **{f"{part}_s": self.prices_s[part] for part in PARTS},
        }  # fmt: skip
        arrays: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in values.items()}
        return DraftCosts(**arrays, experts=self.experts, top_k=self.top_k)

    def _trial(self) -> int | None:
        """Which trial the next dispatch is, if it is one."""
        first, every, done = self.spec.first, self.spec.try_every, self._dispatches
        if not self.pruning.by_cost or (done >= first and done % every):
            return None
        return (done if done < first else done // every) % len(self.spec.trials)

    def record(self, length: int, outcome: Outcome, outcome_HMC: np.ndarray) -> None:
        """Takes note of a dispatch of a speculation length and of what came of its drafts."""
        if not outcome.steps or not self.pruning.by_cost:
            return
        self._dispatches += 1
        tried_MC, hits_MC = outcome_HMC
        total_M1 = self._tried_MC.sum(axis=1, keepdims=True) + tried_MC.sum(axis=1, keepdims=True)
        fade_M1 = np.minimum(1.0, self.spec.tried / np.maximum(total_M1, 1.0))
        self._tried_MC = self._tried_MC * fade_M1 + tried_MC
        self._hits_MC = self._hits_MC * fade_M1 + hits_MC
        size, keep = bucket(outcome.rows), 1 - 1 / self.spec.recent
        tokens, time_s = self._rates.get(size, (0.0, 0.0))
        self._rates[size] = (keep * tokens + outcome.tokens, keep * time_s + outcome.time_s)
        regressors = (outcome.drafted, self._experts(outcome), outcome.deepest, 1 / outcome.steps)
        self._times.add((length, size), regressors, outcome.time_s / outcome.steps)
        if self._dispatches >= self.spec.first and self._dispatches % self.spec.recent == 0:
            self.prices_s = dict(zip(PARTS, self._times.slopes().tolist(), strict=False))

    def _experts(self, outcome: Outcome) -> float:
        """Experts per layer that a step's drafts should have touched and no anchor."""
        miss = 1 - self.top_k / max(self.experts, 1)
        if outcome.touched:
            return outcome.touched[-1] * miss**outcome.rows
        return self.experts * miss**outcome.rows * (1 - miss**outcome.drafted)


def budget_of(pruning: PruningConfig, arch: ArchSpec) -> VerifyBudget | None:
    """The budget that a ``speculative_config`` asks for with this target, None where nothing is cut."""
    return VerifyBudget(pruning, experts_of(arch), chosen_of(arch)) if pruning.enabled else None
