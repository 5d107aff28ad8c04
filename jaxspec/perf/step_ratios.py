"""Ratios of steps with K drafts to plain ones: as a calibration measured, or as the cost model predicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.perf.calibration import Calibration
from jaxspec.perf.cost import ModelCost, Rates
from jaxspec.perf.pass_time import step_time

# Relative error per doubling of rows away from a measured number of them, and of a K between measured ones.
ERROR_PER_DOUBLING = 0.1
PREDICTED_ERROR = 0.3  # relative error of a ratio that comes from a data sheet and assumptions


@dataclass(frozen=True)
class StepRatios:
    """Ratios of steps with K drafts to plain ones, drafting included.

    Attributes:
      by_rows: for each number of rows the lengths K, 0 among them, and the ratios.
      noise: relative error of a ratio at these rows and lengths.
      each: independent error of each ratio, as a multiple of ``noise``, next to an error that all share.
    """

    by_rows: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]]
    noise: float
    each: float = 1.0

    def at(self, length: int, rows: int) -> tuple[float, float] | None:
        """Returns a ratio and its relative error, interpolated linearly; None above the longest known K."""
        known = {b: cells for b, cells in sorted(self.by_rows.items()) if cells[0][-1] >= length}
        if not known:
            return None
        ratios = [float(np.interp(length, *cells)) for cells in known.values()]
        nearest = min(known, key=lambda b: abs(math.log2(b / rows)))
        distance = abs(math.log2(nearest / rows)) + (length not in known[nearest][0])
        ratio = float(np.interp(math.log2(rows), np.log2(list(known)), ratios))
        return ratio, self.noise + ERROR_PER_DOUBLING * distance

    def corrected_by(self, measured: "StepRatios") -> "StepRatios":
        """Returns predicted ratios with what drafts add scaled to ratios that were measured at some number of rows.

        Ratios that are as sure as the measured ones stay as they are.
        """
        if self.noise <= measured.noise:
            return self
        scales: dict[int, float] = {}
        for rows, (lengths, ratios) in measured.by_rows.items():
            scales |= {
                k: (ratio - 1.0) / self._added(k, rows)
                for k, ratio in zip(lengths, ratios, strict=True)
                if ratio > 1.0 and self._added(k, rows) > 0.0
            }
        if not scales:
            return self
        by_rows = {
            b: ((0, *scales), (1.0, *(1.0 + x * self._added(k, b) for k, x in scales.items()))) for b in self.by_rows
        }
        return StepRatios({**by_rows, **measured.by_rows}, measured.noise, measured.each)

    def _added(self, length: int, rows: int) -> float:
        """Returns what drafts add to a plain step, 0 where that is not known."""
        known = self.at(length, rows)
        return 0.0 if known is None else known[0] - 1.0


def step_ratios(calibration: Calibration) -> StepRatios:
    """Returns each measured cell over the plain one of the nearest context, averaged over contexts.

    Raises:
      ConfigError: no number of rows was measured with and without drafts.
    """
    by_rows: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}
    for rows in {p.rows for p in calibration.points}:
        plain = {p.context: p.step_s for p in calibration.points if p.rows == rows and p.length == 0}
        logs: dict[int, list[float]] = {0: [0.0]}
        for p in calibration.points:
            if p.rows == rows and p.length and plain:
                near = min(plain, key=lambda context: abs(context - p.context))
                logs.setdefault(p.length, []).append(math.log(p.step_s / plain[near]))
        if len(logs) > 1:
            lengths = tuple(sorted(logs))
            by_rows[rows] = lengths, tuple(math.exp(float(np.mean(logs[k]))) for k in lengths)
    if not by_rows:
        raise ConfigError(
            "calibration: no number of rows was measured with and without drafts; calibrate with K 0 and some above"
        )
    return StepRatios(by_rows, math.sqrt(2) * calibration.noise_floor)


def prior_ratios(
    model: ModelCost,
    rates: Rates,
    *,
    rows: Sequence[int],
    lengths: Sequence[int],
    context: int = 1024,
    draft_cost: float = 0.0,
) -> StepRatios:
    """Predicts the ratios without any measurement, for a controller that has to start somewhere.

    Args:
      model: of the target; ``ModelCost.from_totals`` makes one from its weights alone.
      rates: of the machine: a data sheet's (``Hardware.rates``), or ``CPU_RATES``.
      rows: batch sizes B.
      lengths: K; 0 is always among the result.
      context: cached positions per row.
      draft_cost: time of drafting one token over that of a plain step.
    """
    lengths = tuple(sorted({0, *lengths}))

    def ratios(b: int) -> tuple[float, ...]:
        times = [step_time(model, rates, rows=b, positions=k + 1, context=context).total_s for k in lengths]
        return tuple(t / times[0] + draft_cost * k for t, k in zip(times, lengths, strict=True))

    return StepRatios({b: (lengths, ratios(b)) for b in rows}, PREDICTED_ERROR)
