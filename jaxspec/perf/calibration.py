"""A calibration: one machine measured with one model, its file, and predictions from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import scipy

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import ModelCost, Rates
from jaxspec.perf.overlap import MeasuredOverlap
from jaxspec.perf.pass_time import step_time
from jaxspec.perf.rate_fit import Fit, MeasuredPass, fit, token_count_model
from jaxspec.perf.record_file import load_record
from jaxspec.whole_file import write_whole

VERSION = 1
REACH = 1.0  # doublings over which a measured point draws predictions to itself


class MeasuredCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured cell.

    Attributes:
      rows, length, context: B, K, and cached positions per row while it was measured.
      step_s: median over rounds of a whole step.
      spread: quartile distance over rounds relative to the median.
      draft_s: drafting alone; 0 for K = 0.
    """

    rows: int
    length: int
    context: int
    step_s: float
    spread: float
    draft_s: float = 0.0

    @property
    def verify_s(self) -> float:
        """The step without the drafting."""
        return self.step_s - self.draft_s


class FitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``Fit`` on file; rates in seconds per unit."""

    rates: dict[str, float]
    interval: dict[str, tuple[float, float]]
    error: float
    held_out_error: float | None


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of ``jaxspec calibrate``.

    Attributes:
      version: of this layout.
      model: name, family, digest of the config and of the files' sizes.
      machine, versions: what it ran on.
      date: day and time, UTC.
      settings: dtype, quantization, drafter, steps per dispatch, rounds.
      noise_floor: median relative spread of the same cell between rounds.
      points: the raw table, which predictions at its cells return.
      overlap: of routed experts, None for a dense model.
      fit: the model of step time.
      token_count_fit: the same points explained by tokens alone, without experts.
      held_out: cells that were measured in the same rounds and kept out of the fits and the table.
    """

    version: int
    model: dict[str, str]
    machine: dict[str, str | int]
    versions: dict[str, str]
    date: str
    settings: dict[str, str | int | float]
    noise_floor: float
    points: tuple[MeasuredCell, ...]
    overlap: MeasuredOverlap | None
    fit: FitRecord
    token_count_fit: FitRecord
    held_out: tuple[MeasuredCell, ...] = ()


def fit_points(
    model: ModelCost, points: Sequence[MeasuredCell], overlap: MeasuredOverlap | None, noise: float
) -> tuple[Fit, Fit]:
    """Fits the model of step time, and the one that counts tokens alone, to the same points."""
    samples = [MeasuredPass(p.rows, p.length + 1, p.context, p.verify_s) for p in points]
    return fit(model, samples, overlap=overlap, noise=noise), fit(token_count_model(model), samples, noise=noise)


def record_of(fitted: Fit) -> FitRecord:
    """Converts a fit for the file."""
    rates = {name: getattr(fitted.rates, name) for name in fitted.interval}
    return FitRecord(
        rates, fitted.interval, fitted.error, None if math.isnan(fitted.held_out_error) else fitted.held_out_error
    )


def save_calibration(calibration: Calibration, file: Path) -> None:
    """Writes JSON."""
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    write_whole(file, text + b"\n")


def load_calibration(file: Path) -> Calibration:
    """Reads what ``save_calibration`` wrote.

    Raises:
      ConfigError: the file is missing, of another version, or says anything else.
    """
    remedy = "run jaxspec calibrate to make one"
    calibration = load_record(file, Calibration, "calibration", VERSION, remedy)
    known = set(Rates.__dataclass_fields__)
    wrong = [name for f in (calibration.fit, calibration.token_count_fit) for name in f.rates if name not in known]
    cells = calibration.points + calibration.held_out
    bad = [p for p in cells if min(p.rows, p.step_s, p.verify_s) <= 0 or min(p.length, p.context) < 0]
    if wrong or bad or not calibration.points:
        raise ConfigError(f"{file}: unknown rates {wrong} or impossible points {bad[:3]}; {remedy}")
    return calibration


@dataclass(frozen=True)
class Predictor:
    """Predictions by a calibration: the measurement at measured cells, elsewhere the formula corrected by cells nearby.

    Attributes:
      calibration: of the machine with this model.
      model: the same one.
      token_count: predict with the fit that counts tokens alone, and without the table (the ablation).
    """

    calibration: Calibration
    model: ModelCost
    token_count: bool = False

    @property
    def rates(self) -> Rates:
        """Fitted."""
        chosen = self.calibration.token_count_fit if self.token_count else self.calibration.fit
        values: dict[str, Any] = dict(chosen.rates)
        return Rates(**values)

    def formula_s(self, rows: int, positions: int, context: int) -> float:
        """Predicts one pass of the target by the fitted formula alone."""
        model = token_count_model(self.model) if self.token_count else self.model
        overlap = None if self.token_count else self.calibration.overlap
        return step_time(model, self.rates, rows=rows, positions=positions, context=context, overlap=overlap).total_s

    def verify_s(self, rows: int, length: int, context: int) -> float:
        """Predicts one step with K drafts, without the drafting; K = 0 is a plain step."""
        formula = self.formula_s(rows, length + 1, context)
        return formula if self.token_count else formula * self._drawn(self._verify_errors, rows, length, context)

    def draft_s(self, rows: int, length: int, context: int) -> float:
        """Predicts drafting K tokens with the drafter that was measured, 0 for K = 0.

        Raises:
          ConfigError: no drafting was measured.
        """
        if length == 0:
            return 0.0
        if self._draft_line is None:
            raise ConfigError("calibration: it has no points with drafts; calibrate with K above 0")
        return self._line(rows, length) * self._drawn(self._draft_errors, rows, length, context)

    def _line(self, rows: int, length: int) -> float:
        assert self._draft_line is not None
        return max(float(self._draft_line @ np.asarray([1.0, rows, length, rows * length])), 1e-12)

    @cached_property
    def _draft_line(self) -> np.ndarray | None:
        points = [p for p in self.calibration.points if p.draft_s > 0]
        if not points:
            return None
        scale = np.asarray([1 / p.draft_s for p in points])
        terms = np.asarray([[1.0, p.rows, p.length, p.rows * p.length] for p in points])
        return scipy.optimize.nnls(terms * scale[:, None], np.ones(len(points)))[0]

    @cached_property
    def _verify_errors(self) -> list[tuple[MeasuredCell, float]]:
        return [
            (p, math.log(p.verify_s / self.formula_s(p.rows, p.length + 1, p.context))) for p in self.calibration.points
        ]

    @cached_property
    def _draft_errors(self) -> list[tuple[MeasuredCell, float]]:
        drafted = [p for p in self.calibration.points if p.draft_s > 0]
        return [(p, math.log(p.draft_s / self._line(p.rows, p.length))) for p in drafted]

    def _drawn(self, errors: list[tuple[MeasuredCell, float]], rows: int, length: int, context: int) -> float:
        """Computes the correction by measured cells, weighted by inverse square distance (Shepard 1968)."""
        total, weight = 0.0, 1 / REACH**2
        for point, error in errors:
            apart = (
                math.log2(point.rows / rows), math.log2((point.length + 1) / (length + 1)),
                math.log2((point.context + 64) / (context + 64)),
            )  # fmt: skip
            distance = sum(x * x for x in apart)
            if distance < 1e-18:
                return math.exp(error)
            total, weight = total + error / distance, weight + 1 / distance
        return math.exp(total / weight)
