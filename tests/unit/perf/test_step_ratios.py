"""Ratios of step times from a calibration's raw cells."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.calibration import MeasuredCell
from jaxspec.perf.cost import ModelCost, Rates
from jaxspec.perf.hardware import CPU_RATES
from jaxspec.perf.step_ratios import ERROR_PER_DOUBLING, StepRatios, prior_ratios, step_ratios


@dataclass
class Cells:
    """What is read of a calibration."""

    points: list[MeasuredCell] = field(default_factory=list)
    noise_floor: float = 0.01


def cells(*points: tuple[int, int, int, float]) -> Any:
    return Cells([MeasuredCell(rows, length, context, step_s, 0.0) for rows, length, context, step_s in points])


def test_measured_cells_and_the_lines_between_them():
    ratios = step_ratios(cells((1, 0, 64, 2.0), (1, 2, 64, 3.0), (1, 4, 64, 4.0), (4, 0, 64, 2.0), (4, 4, 64, 8.0)))
    assert ratios.at(2, 1) == pytest.approx((1.5, 0.01 * 2**0.5))
    assert ratios.at(4, 2) == pytest.approx((3.0, 0.01 * 2**0.5 + ERROR_PER_DOUBLING)), "halfway in doublings"
    assert ratios.at(3, 1) == pytest.approx((1.75, 0.01 * 2**0.5 + ERROR_PER_DOUBLING))
    assert ratios.at(2, 4) == pytest.approx((2.5, 0.01 * 2**0.5 + ERROR_PER_DOUBLING)), (
        "of 4 rows by the line from K = 0"
    )
    assert ratios.at(4, 16) == pytest.approx((4.0, 0.01 * 2**0.5 + 2 * ERROR_PER_DOUBLING))
    assert ratios.at(5, 1) is None


def test_contexts_are_averaged_and_compared_with_the_nearest_plain_step():
    ratios = step_ratios(cells((1, 0, 64, 1.0), (1, 1, 66, 2.0), (1, 0, 512, 10.0), (1, 1, 515, 80.0), (2, 3, 64, 5.0)))
    assert ratios.at(1, 1) == pytest.approx((4.0, 0.01 * 2**0.5)), "the geometric mean of 2 and 8"
    assert ratios.at(3, 1) is None, "no plain step was measured with as many rows"


def test_a_table_without_drafts():
    with pytest.raises(ConfigError, match="measured with and without drafts"):
        step_ratios(cells((1, 0, 64, 1.0), (2, 1, 64, 1.0)))


def test_predicted_ratios_grow_with_drafts_and_less_where_experts_are_many() -> None:
    dense = ModelCost.from_totals(layers=4, dense_bytes=4e9)
    sparse = ModelCost.from_totals(
        layers=4, dense_bytes=1e9, routed_layers=4, experts=64, top_k=2, expert_bytes=1e9 / 8
    )
    rates = Rates(byte_s=1e-12, flop_s=1e-15, expert_byte_s=1e-12, expert_flop_s=1e-15)
    few, many = (prior_ratios(model, rates, rows=(1, 256), lengths=(1, 4)) for model in (dense, sparse))
    assert few.by_rows[1][0] == (0, 1, 4)
    assert few.by_rows[1][1] == pytest.approx((1, 1, 1), rel=1e-2), "the weights are read once whatever K"
    assert 1.3 < many.at(1, 1)[0] < many.at(4, 1)[0] < 3, "more positions touch more experts"
    assert many.at(4, 256)[0] < 1.05, "256 rows touch them all anyway"


def test_drafting_counts_per_token() -> None:
    model = ModelCost.from_totals(layers=2, dense_bytes=1e9)
    free, dear = (
        prior_ratios(model, CPU_RATES, rows=(1,), lengths=(1, 3), draft_cost=cost).by_rows[1][1] for cost in (0.0, 0.1)
    )
    assert [b - a for a, b in zip(free, dear, strict=True)] == pytest.approx([0.0, 0.1, 0.3])


def test_predicted_ratios_are_scaled_to_measured_ones() -> None:
    predicted = StepRatios({1: ((0, 1, 2), (1.0, 1.1, 1.2)), 8: ((0, 1, 2), (1.0, 1.2, 1.5))}, 0.3)
    measured = StepRatios({8: ((0, 1, 2), (1.0, 1.4, 2.0))}, 0.1, 0.35)
    both = predicted.corrected_by(measured)
    assert (both.noise, both.each) == (0.1, 0.35)
    assert [both.at(k, 8)[0] for k in (0, 1, 2)] == pytest.approx([1.0, 1.4, 2.0])
    assert [both.at(k, 1)[0] for k in (0, 1, 2)] == pytest.approx([1.0, 1.2, 1.4]), "twice what was predicted"
    assert measured.corrected_by(predicted) is measured, "what is as sure stays"
    assert predicted.corrected_by(StepRatios({8: ((0,), (1.0,))}, 0.1)) is predicted, "no draft was measured"
