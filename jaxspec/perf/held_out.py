"""Accuracy of a calibration on cells that it was not fitted to: their times, and whether speculation pays there."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.perf.calibration import Calibration, MeasuredCell, Predictor
from jaxspec.perf.cost import ModelCost
from jaxspec.perf.moesd import acceptance_length

ACCEPTANCES = tuple(round(0.3 + 0.05 * i, 2) for i in range(13))
Time = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Judged:
    """The errors of one way of predicting.

    Attributes:
      verify_error: mean absolute relative error of a pass of the target, drafting left out.
      worst: the greatest of them.
      ratio_error: the same as ``verify_error`` of the time of a whole step over that of a plain one.
      right: of the questions whether speculation pays, how many it answers as the measurement does.
      right_when_clear: likewise, of those whose measured speed-up is farther from 1 than the noise floor.
    """

    verify_error: float
    worst: float
    ratio_error: float
    right: int
    right_when_clear: int


@dataclass(frozen=True)
class HeldOut:
    """Predictions of held-out cells.

    Attributes:
      cells: how many.
      questions: cells with drafts times acceptances (``ACCEPTANCES``, i.i.d.): does speculation pay?
      clear: those whose measured speed-up is farther from 1 than the noise floor.
      pays: of all, in how many it does.
      predicted: as ``jaxspec plan`` and the controller predict, by the formula drawn to measured cells.
      formula: the formula alone.
      token_count: the formula of those who count tokens and not experts, fitted to the same points.
    """

    cells: int
    questions: int
    clear: int
    pays: int
    predicted: Judged
    formula: Judged
    token_count: Judged


def judge(calibration: Calibration, model: ModelCost) -> HeldOut:
    """Compares predictions with the held-out cells of a calibration.

    Raises:
      ConfigError: it has none.
    """
    if not any(p.length for p in calibration.held_out):
        raise ConfigError("calibration: no cells with drafts were held out; calibrate with --held-out-lengths")
    full, blind = Predictor(calibration, model), Predictor(calibration, model, token_count=True)
    plain = {p.rows: p for p in (*calibration.points, *calibration.held_out) if p.length == 0}
    plain |= {p.rows: p for p in reversed(calibration.points) if p.length == 0}
    drafted = [p for p in calibration.held_out if p.length]
    gains = np.asarray([[_tau(p, a) * plain[p.rows].step_s / p.step_s for a in ACCEPTANCES] for p in drafted])
    clear = np.abs(np.log(gains)) > calibration.noise_floor

    def judged(verify_s: Time) -> Judged:
        errors = [abs(verify_s(p.rows, p.length, p.context) / p.verify_s - 1) for p in calibration.held_out]
        ratios = np.asarray([_ratio(p, verify_s, full.draft_s) for p in drafted])
        measured = np.asarray([p.step_s / plain[p.rows].step_s for p in drafted])
        predicted = np.asarray([[_tau(p, a) for a in ACCEPTANCES] for p in drafted]) / ratios[:, None]
        right = (predicted > 1) == (gains > 1)
        return Judged(
            float(np.mean(errors)),
            max(errors),
            float(np.mean(np.abs(ratios / measured - 1))),
            int(right.sum()),
            int((right & clear).sum()),
        )

    return HeldOut(
        cells=len(calibration.held_out),
        questions=gains.size,
        clear=int(clear.sum()),
        pays=int((gains > 1).sum()),
        predicted=judged(full.verify_s),
        formula=judged(lambda rows, length, context: full.formula_s(rows, length + 1, context)),
        token_count=judged(blind.verify_s),
    )


def _tau(point: MeasuredCell, acceptance: float) -> float:
    return acceptance_length(acceptance=acceptance, length=point.length)


def _ratio(point: MeasuredCell, verify_s: Time, draft_s: Time) -> float:
    """Predicted time of a step over that of a plain one."""
    rows, length, context = point.rows, point.length, point.context
    plain_s = verify_s(rows, 0, context)
    return (verify_s(rows, length, context) + draft_s(rows, length, context)) / plain_s if plain_s else math.inf
