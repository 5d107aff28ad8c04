"""Fitting step times that were made from known rates."""

from dataclasses import replace

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import Rates
from jaxspec.perf.overlap import AssumedOverlap
from jaxspec.perf.pass_time import step_time
from jaxspec.perf.rate_fit import MeasuredPass, fit, token_count_model
from tests.unit.perf.models import dense_model, routed_model

TRUE = Rates(
    fixed_s=2e-3, row_s=1e-4, position_s=2e-5, byte_s=4e-7, flop_s=2e-8, expert_byte_s=3e-6, expert_flop_s=1e-8,
    kv_byte_s=2e-7,
)  # fmt: skip
CELLS = [(b, k + 1, c) for b in (1, 2, 4, 8) for k in (0, 1, 3, 7) for c in (100,)]
CELLS += [(1, 1, 2000), (1, 4, 2000), (4, 1, 2000), (8, 1, 2000), (8, 4, 2000)]


def samples(model, noise: float = 0.0, overlap=None, cells=CELLS) -> list[MeasuredPass]:
    generator = np.random.default_rng(3)
    found = []
    for rows, positions, context in cells:
        time_s = step_time(model, TRUE, rows=rows, positions=positions, context=context, overlap=overlap).total_s
        found.append(MeasuredPass(rows, positions, context, time_s * (1 + noise * generator.standard_normal())))
    return found


def predict(found, model, rows, positions, context, overlap=None) -> float:
    return step_time(model, found.rates, rows=rows, positions=positions, context=context, overlap=overlap).total_s


def test_twenty_one_exact_points_give_exact_predictions():
    model = routed_model()
    found = fit(model, samples(model))
    assert len(CELLS) == 21
    assert found.error < 1e-3
    assert found.held_out_error < 0.005
    for cell in ((3, 3, 500), (6, 2, 1000), (5, 6, 100)):
        assert predict(found, model, *cell) == pytest.approx(predict(fit_of(TRUE), model, *cell), rel=0.005)


def fit_of(rates: Rates):
    return type("Known", (), {"rates": rates})()


def test_rates_that_the_points_can_tell_are_found():
    model = routed_model()
    found = fit(model, samples(model), noise=0.002)
    assert found.rates.kv_byte_s == pytest.approx(TRUE.kv_byte_s, rel=0.02)
    assert found.rates.expert_byte_s == pytest.approx(TRUE.expert_byte_s, rel=0.05)
    low, high = found.interval["kv_byte_s"]
    assert low <= TRUE.kv_byte_s <= high
    assert high - low < TRUE.kv_byte_s
    fixed = found.interval["fixed_s"]
    assert fixed[1] - fixed[0] > 2 * TRUE.fixed_s * 0.05, "fixed time and dense weights cannot be told apart"


def test_noise_and_an_outlier_do_little_harm():
    model = routed_model()
    points = samples(model, noise=0.02)
    spoiled = [*points[:5], replace(points[5], time_s=3 * points[5].time_s), *points[6:]]
    found = fit(model, spoiled, noise=0.02)
    errors = [abs(predict(found, model, *c) / predict(fit_of(TRUE), model, *c) - 1) for c in CELLS]
    assert np.mean(errors) < 0.03


def test_rates_are_never_negative():
    model = routed_model()
    found = fit(model, [replace(s, time_s=1e-3) for s in samples(model)])
    assert all(getattr(found.rates, name) >= 0 for name in found.interval)
    assert all(0 <= low <= high for low, high in found.interval.values())
    assert found.error < 0.01


def test_counting_tokens_alone_cannot_explain_experts():
    """Equal numbers of tokens touch different numbers of experts where rows are independent and positions are not."""
    model, overlap = routed_model(), AssumedOverlap(0.5)
    points = samples(model, overlap=overlap)
    blind = token_count_model(model)
    assert blind.routed is None
    assert blind.layers[0].dense_flops == 1000 + 2 * 200
    full, tokens_only = fit(model, points, overlap=overlap), fit(blind, points)
    assert full.error < 0.002
    assert tokens_only.error > 4 * full.error
    assert tokens_only.held_out_error > full.held_out_error
    assert "expert_byte_s" not in tokens_only.interval


def test_a_dense_model_is_fitted_without_experts():
    model = dense_model()
    found = fit(model, samples(model))
    assert set(found.interval) == {"fixed_s", "row_s", "position_s", "byte_s", "flop_s", "kv_byte_s"}
    assert found.error < 1e-3


def test_too_few_points():
    model = routed_model()
    with pytest.raises(ConfigError, match="needs 8 samples with positive times, got 3"):
        fit(model, samples(model)[:3])
    with pytest.raises(ConfigError, match="positive times"):
        fit(model, [replace(s, time_s=0.0) for s in samples(model)])
