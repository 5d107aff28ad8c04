"""How many plain steps a step with K drafts takes, from the cells that a calibration measured."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.perf.calibration import Calibration

APART = 0.1  # relative error per doubling of rows away from a measured number of them, and of a K between measured ones


@dataclass(frozen=True)
class StepRatios:
    """Measured ratios, drafting included.

    Attributes:
      by_rows: for each measured number of rows the lengths K, 0 among them, and the ratios.
      noise: relative error of a ratio that was measured.
      each: error that each ratio has by itself, over ``noise``; besides, what drafts add may be wrong by the same share
        for all.
    """

    by_rows: Mapping[int, tuple[tuple[int, ...], tuple[float, ...]]]
    noise: float
    each: float = 1.0

    def at(self, length: int, rows: int) -> tuple[float, float] | None:
        """Ratio and its relative error, straight lines between cells; None above the longest measured K."""
        known = {b: cells for b, cells in sorted(self.by_rows.items()) if cells[0][-1] >= length}
        if not known:
            return None
        ratios = [float(np.interp(length, *cells)) for cells in known.values()]
        places = np.log2(list(known))
        nearest = min(known, key=lambda b: abs(math.log2(b / rows)))
        away = abs(math.log2(nearest / rows)) + (length not in known[nearest][0])
        return float(np.interp(math.log2(rows), places, ratios)), self.noise + APART * away


def step_ratios(calibration: Calibration) -> StepRatios:
    """Reads the raw table: each cell over the plain one of the nearest context, averaged over contexts.

    Raises:
      ConfigError: no number of rows was measured with and without drafts.
    """
    found: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}
    for rows in {p.rows for p in calibration.points}:
        plain = {p.context: p.step_s for p in calibration.points if p.rows == rows and p.length == 0}
        logs: dict[int, list[float]] = {0: [0.0]}
        for p in calibration.points:
            if p.rows == rows and p.length and plain:
                near = min(plain, key=lambda context: abs(context - p.context))
                logs.setdefault(p.length, []).append(math.log(p.step_s / plain[near]))
        if len(logs) > 1:
            lengths = tuple(sorted(logs))
            found[rows] = lengths, tuple(math.exp(float(np.mean(logs[k]))) for k in lengths)
    if not found:
        raise ConfigError(
            "calibration: no number of rows was measured with and without drafts; calibrate with K 0 and some above"
        )
    return StepRatios(found, math.sqrt(2) * calibration.noise_floor)
