"""Ratios of step times from a calibration's raw cells."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.calibration import Point
from jaxspec.perf.step_ratios import APART, step_ratios


@dataclass
class Cells:
    """What is read of a calibration."""

    points: list[Point] = field(default_factory=list)
    noise_floor: float = 0.01


def cells(*points: tuple[int, int, int, float]) -> Any:
    return Cells([Point(rows, length, context, step_s, 0.0) for rows, length, context, step_s in points])


def test_measured_cells_and_the_lines_between_them():
    ratios = step_ratios(cells((1, 0, 64, 2.0), (1, 2, 64, 3.0), (1, 4, 64, 4.0), (4, 0, 64, 2.0), (4, 4, 64, 8.0)))
    assert ratios.at(2, 1) == pytest.approx((1.5, 0.01 * 2**0.5))
    assert ratios.at(4, 2) == pytest.approx((3.0, 0.01 * 2**0.5 + APART)), "halfway in doublings"
    assert ratios.at(3, 1) == pytest.approx((1.75, 0.01 * 2**0.5 + APART))
    assert ratios.at(2, 4) == pytest.approx((2.5, 0.01 * 2**0.5 + APART)), "of 4 rows by the line from K = 0"
    assert ratios.at(4, 16) == pytest.approx((4.0, 0.01 * 2**0.5 + 2 * APART))
    assert ratios.at(5, 1) is None


def test_contexts_are_averaged_and_compared_with_the_nearest_plain_step():
    ratios = step_ratios(cells((1, 0, 64, 1.0), (1, 1, 66, 2.0), (1, 0, 512, 10.0), (1, 1, 515, 80.0), (2, 3, 64, 5.0)))
    assert ratios.at(1, 1) == pytest.approx((4.0, 0.01 * 2**0.5)), "the geometric mean of 2 and 8"
    assert ratios.at(3, 1) is None, "no plain step was measured with as many rows"


def test_a_table_without_drafts():
    with pytest.raises(ConfigError, match="measured with and without drafts"):
        step_ratios(cells((1, 0, 64, 1.0), (2, 1, 64, 1.0)))
