"""The joint normal law of the control's step times, against the formulas of linear regression."""

import numpy as np
import pytest

from jaxspec.serve.normal import CLIP, Normal


def known(places: int = 3, spread: float = 4.0) -> Normal:
    law = Normal(noise=0.25, least_noise=0.25, slowness=1e9)
    law.add(np.arange(1.0, places + 1), np.diag(np.full(places, spread)))
    return law


def test_measurements_give_what_least_squares_with_a_prior_gives():
    law, rng = known(), np.random.default_rng(0)
    by_MN, weight_M = rng.standard_normal((12, 3)), rng.uniform(0.3, 1.0, 12)
    value_M = by_MN @ np.array([0.5, 2.5, 2.0]) + 0.1 * rng.standard_normal(12)
    for by_N, value, weight in zip(by_MN, value_M, weight_M, strict=True):
        law.measure(by_N, value - by_N @ law.mean_N, weight)
    precision_NN = np.eye(3) / 4.0 + by_MN.T @ (by_MN * weight_M[:, None]) / 0.25
    mean_N = np.linalg.solve(precision_NN, np.arange(1.0, 4.0) / 4.0 + by_MN.T @ (value_M * weight_M) / 0.25)
    np.testing.assert_allclose(law.mean_N, mean_N, rtol=1e-9)
    np.testing.assert_allclose(law.cov_NN, np.linalg.inv(precision_NN), rtol=1e-9)


def test_what_is_like_another_number_learns_from_it():
    law = known()
    first = law.add(np.array([10.0]), np.array([[1.0]]), np.array([1]))
    assert law.mean_N[first] == 12.0, "by ten more than the second"
    assert law.cov_NN[first, first] == 5.0
    law.measure(np.array([0.0, 1.0, 0.0, 0.0]), 1.0)
    assert law.mean_N[first] - law.mean_N[1] == pytest.approx(10.0)
    assert law.cov_NN[first, first] == pytest.approx(1.0 + law.cov_NN[1, 1])


def test_numbers_that_are_dropped_leave_the_others_as_they_were():
    law, rng = known(5), np.random.default_rng(1)
    for _ in range(5):
        law.measure(rng.standard_normal(5), 0.3)
    mean_N, cov_NN, left = law.mean_N, law.cov_NN, [0, 3, 4]
    law.drop(1, 2)
    np.testing.assert_array_equal(law.mean_N, mean_N[left])
    np.testing.assert_array_equal(law.cov_NN, cov_NN[np.ix_(left, left)])


def test_a_measurement_far_off_counts_as_one_at_the_edge():
    far, edge = known(), known()
    by_N = np.array([1.0, 0.0, 0.0])
    far.measure(by_N, 100.0)
    edge.measure(by_N, CLIP * (4.0 + 0.25) ** 0.5)
    np.testing.assert_allclose(far.mean_N, edge.mean_N)


def test_noise_is_learnt_where_the_numbers_are_known():
    law, rng = Normal(noise=0.01, least_noise=1e-6, slowness=64.0), np.random.default_rng(2)
    law.add(np.zeros(1), np.zeros((1, 1)))
    for weight in (1.0, 0.25) * 2000:
        law.measure(np.ones(1), 0.03 / weight**0.5 * rng.standard_normal() - law.mean_N[0], weight)
    assert law.noise == pytest.approx(0.03**2, rel=0.3)


def test_time_makes_a_fading_number_what_it_usually_is_and_others_less_sure():
    law = known()
    law.measure(np.array([1.0, 1.0, 0.0]), 2.0)
    sure, together = law.cov_NN[1, 1], law.cov_NN[0, 1]
    law.fade(0, 0.5, 4.0)
    assert law.cov_NN[0, 1] == law.cov_NN[1, 0] == 0.5 * together
    assert law.cov_NN[1, 1] == sure
    for _ in range(60):
        law.fade(0, 0.5, 4.0)
    assert law.mean_N[0] == pytest.approx(0.0, abs=1e-9)
    assert law.cov_NN[0, 0] == pytest.approx(4.0)
    last = law.cov_NN[2, 2]
    law.blur(1, None, 0.1)
    assert law.cov_NN[1, 1] == pytest.approx(sure + 0.1)
    assert law.cov_NN[2, 2] == pytest.approx(last + 0.1)
    assert law.cov_NN[0, 0] == pytest.approx(4.0)
