"""Fits the model of step time to measured steps: robust, non-negative least squares with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import SHARPNESS, LayerCost, ModelCost, Rates, works
from jaxspec.perf.overlap import Overlap
from jaxspec.perf.pass_time import RATE_OF

OVERHEADS = ("fixed_s", "row_s", "position_s")
WORK = ("byte_s", "flop_s", "expert_byte_s", "expert_flop_s", "kv_byte_s")
RIDGE, STARTS = 1e-3, (0.3, 0.05, 1.0)


@dataclass(frozen=True)
class MeasuredPass:
    """One measured pass: rows, positions per row, cached positions per row, and its time."""

    rows: int
    positions: int
    context: int
    time_s: float


@dataclass(frozen=True)
class Fit:
    """Fitted rates.

    Attributes:
      rates: of the machine.
      interval: 95 % confidence interval of each fitted rate, from the curvature of the fit; wide where the points do
        not tell a rate from others.
      error: mean absolute relative error at the fitted points.
      held_out_error: the same at each point when the others alone are fitted.
    """

    rates: Rates
    interval: dict[str, tuple[float, float]]
    error: float
    held_out_error: float


def token_count_model(model: ModelCost) -> ModelCost:
    """Returns the model of those who count tokens alone: routed experts compute, but which are read does not matter."""

    def blind(layer: LayerCost) -> LayerCost:
        computed = layer.dense_flops + layer.top_k * layer.expert_flops
        return replace(layer, dense_flops=computed, experts=0, top_k=0, expert_bytes=0.0, expert_flops=0.0)

    return replace(model, layers=tuple(map(blind, model.layers)), prediction=None)


def fit(
    model: ModelCost, samples: Sequence[MeasuredPass], *, overlap: Overlap | None = None, noise: float = 0.01
) -> Fit:
    """Fits all rates that the samples can say something about.

    Args:
      model: what was run.
      samples: at least as many as there are rates, of different rows and positions.
      overlap: of routed experts where the samples were taken.
      noise: relative noise of the measurement; larger residuals count less than squared.

    Raises:
      ConfigError: there are too few samples, or times that are not positive.
    """
    problem = Problem(model, tuple(samples), overlap, noise)
    needed = len(problem.names)
    if len(samples) < needed or not all(s.time_s > 0 for s in samples):
        raise ConfigError(f"fit: needs {needed} samples with positive times, got {len(samples)}")
    x, covariance = problem.solve(np.arange(len(samples)))
    rates = problem.rates(x)
    spread = 1.96 * np.sqrt(np.diag(covariance))
    interval = {
        name: (float(max(v - d, 0.0) * s), float((v + d) * s))
        for name, v, d, s in zip(problem.names, x, spread, problem.scale, strict=True)
    }
    error = float(np.mean(np.abs(problem.residuals(x))))
    held_out = []
    for left in range(len(samples)) if len(samples) > needed else ():
        others = np.delete(np.arange(len(samples)), left)
        held_out.append(abs(problem.residuals(problem.solve(others, x)[0])[left]))
    return Fit(rates, interval, error, float(np.mean(held_out)) if held_out else float("nan"))


@dataclass(frozen=True)
class Problem:
    """A search for the rates that explain the times of some amounts of work.

    Unknowns are scaled: at 1 a rate alone explains the median step.
    """

    model: ModelCost
    samples: tuple[MeasuredPass, ...]
    overlap: Overlap | None
    noise: float

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Rates that matter to this model."""
        routed = self.model.routed is not None
        kv = any(layer.caches for layer in self.model.layers)
        skipped = ({"expert_byte_s", "expert_flop_s"} if not routed else set()) | (set() if kv else {"kv_byte_s"})
        return tuple(name for name in (*OVERHEADS, *WORK) if name not in skipped)

    @cached_property
    def scale(self) -> np.ndarray:
        """Rate of an unknown of 1."""
        typical = float(np.median([s.time_s for s in self.samples]))
        return typical / np.maximum(np.median(self._amounts, axis=0), 1e-30)

    @cached_property
    def _works(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Counts and bytes and products [samples, works], and the two unknowns of each work [works, 2]."""
        lists = [
            works(self.model, rows=s.rows, positions=s.positions, context=s.context, overlap=self.overlap)
            for s in self.samples
        ]
        count, size, flops = (
            np.asarray([[getattr(w, name) for w in parts] for parts in lists], float)
            for name in ("count", "size_bytes", "flops")
        )
        which = np.asarray([[self.names.index(name) for name in RATE_OF[w.cause]] for w in lists[0]])
        return count, size, flops, which

    @cached_property
    def _amounts(self) -> np.ndarray:
        """Units of each rate in each sample, [samples, rates]."""
        count, size, flops, which = self._works
        units = np.zeros((len(self.samples), len(self.names)))
        for unknown_of, amounts in zip(which.T, (size, flops), strict=True):
            np.add.at(units.T, unknown_of, (count * amounts).T)
        units[:, 0] = 1
        units[:, 1] = [s.rows for s in self.samples]
        units[:, 2] = [s.rows * s.positions for s in self.samples]
        return units

    def times(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predicted seconds of every sample, and their derivatives by the unknowns [samples, rates]."""
        count, size, flops, which = self._works
        rate = x * self.scale
        both = np.stack([size * rate[which[:, 0]], flops * rate[which[:, 1]]])
        top = np.maximum(both.max(axis=0), 1e-300)
        smooth = top * np.sum((both / top) ** SHARPNESS, axis=0) ** (1 / SHARPNESS)
        slope = count * (both / smooth) ** (SHARPNESS - 1)
        derivative = np.zeros((len(self.samples), len(rate)))
        derivative[:, :3] = self._amounts[:, :3]
        for unknown_of, part, amounts in zip(which.T, slope, (size, flops), strict=True):
            np.add.at(derivative.T, unknown_of, (part * amounts).T)
        return self._amounts[:, :3] @ rate[:3] + np.sum(count * smooth, axis=1), derivative * self.scale

    @cached_property
    def _measured(self) -> np.ndarray:
        return np.asarray([s.time_s for s in self.samples])

    def residuals(self, x: np.ndarray) -> np.ndarray:
        """Computes relative errors of every sample."""
        return self.times(x)[0] / self._measured - 1

    def solve(self, chosen: np.ndarray, start: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Unknowns that fit the chosen samples, and their covariance."""
        width = len(self.names)

        # A little weight on the size of unknowns decides between those that the samples cannot tell apart.
        def penalized(x: np.ndarray) -> np.ndarray:
            return np.concatenate([self.residuals(x)[chosen], RIDGE * x])

        def derivatives(x: np.ndarray) -> np.ndarray:
            derivative = self.times(x)[1] / self._measured[:, None]
            return np.concatenate([derivative[chosen], RIDGE * np.eye(width)])

        jacobian: Any = derivatives
        runs = [
            scipy.optimize.least_squares(
                penalized, first, jac=jacobian, bounds=(0, np.inf), loss="soft_l1",
                f_scale=max(self.noise, 0.005), x_scale=0.1, max_nfev=300,
            )
            for first in ([np.full(width, x) for x in STARTS] if start is None else [np.maximum(start, 1e-6)])
        ]  # fmt: skip
        best = min(runs, key=lambda run: run.cost)
        rest = self.residuals(best.x)[chosen]
        sigma = max(1.4826 * float(np.median(np.abs(rest))), self.noise)
        return best.x, sigma**2 * np.linalg.pinv(best.jac.T @ best.jac)

    def rates(self, x: np.ndarray) -> Rates:
        """Unknowns as rates."""
        values: dict[str, Any] = {name: float(v) for name, v in zip(self.names, x * self.scale, strict=True)}
        return Rates(**values)
