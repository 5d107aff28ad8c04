"""MoESD's formulas against published and derived tables."""

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.moesd import (
    acceptance_length,
    break_even_acceptance,
    expected_experts,
    mean_acceptance_length,
    saturation_tokens,
    speedup,
    survival,
    survival_length,
    target_efficiency,
    tokens_per_expert,
)

# top_k, experts: tokens that saturate 95 % and 90 %; experts touched by 1, 2, 4, 8, 16, 32 tokens
TABLE = {
    (2, 8): (11, 9, [2, 3.5, 5.5, 7.2, 7.9, 8.0]),
    (8, 64): (23, 18, [8, 15.0, 26.5, 42.0, 56.4, 63.1]),
    (8, 128): (47, 36, [8, 15.5, 29.1, 51.6, 82.4, 112]),
    (4, 128): (95, 73, [4, 7.9, 15.3, 28.7, 51, 82]),
    (8, 256): (95, 73, [8, 15.8, 30.5, 57.4, 102, 163]),
    (6, 256): (127, 98, [6, 11.9, 23.2, 44.2, 80.8, 136]),
    (6, 384): (191, 147, [6, 11.9, 23.4, 45.5, 85.5, 152]),
    (10, 512): (152, 117, [10, 19.8, 38.8, 74.7, 139, 240]),
}
# drafts: tokens per pass at acceptance .57, .65, .7, .75, .8, .9
LENGTHS = {
    1: [1.57, 1.65, 1.70, 1.75, 1.80, 1.90],
    2: [1.89, 2.07, 2.19, 2.31, 2.44, 2.71],
    3: [2.08, 2.35, 2.53, 2.73, 2.95, 3.44],
    4: [2.19, 2.53, 2.77, 3.05, 3.36, 4.10],
    5: [2.25, 2.64, 2.94, 3.29, 3.69, 4.69],
    7: [2.30, 2.77, 3.14, 3.60, 4.16, 5.70],
}
# MoESD's runs: drafts, sigma, speed-up, and the cost of a step that this implies.
MEASURED = {
    "Qwen2-57B-A14B, two of GPU B": (4, 0.90, 2.29, 1.97),
    "Qwen2-57B-A14B, four of GPU C": (3, 0.93, 2.14, 1.74),
    "Mixtral, gamma 4": (4, 0.58, 1.79, 1.62),
    "Mixtral, gamma 3": (3, 0.66, 1.69, 1.56),
}


@pytest.mark.parametrize(("top_k", "num_experts"), TABLE)
def test_experts_touched(top_k: int, num_experts: int):
    at_95, at_90, touched = TABLE[top_k, num_experts]
    sizes = {"num_experts": num_experts, "top_k": top_k}
    assert saturation_tokens(**sizes) == at_95
    assert saturation_tokens(**sizes, share=0.9) == at_90
    for tokens, experts in zip((1, 2, 4, 8, 16, 32), touched, strict=True):
        assert expected_experts(**sizes, tokens=tokens) == pytest.approx(experts, rel=0.007)
        assert tokens_per_expert(**sizes, tokens=tokens) == pytest.approx(top_k * tokens / experts, rel=0.007)


def test_a_dense_layer_is_one_expert():
    assert expected_experts(num_experts=1, top_k=1, tokens=7) == 1
    assert saturation_tokens(num_experts=1, top_k=1) == 1
    assert tokens_per_expert(num_experts=1, top_k=1, tokens=7) == 7


@pytest.mark.parametrize("length", LENGTHS)
def test_acceptance_length(length: int):
    for acceptance, expected in zip((0.57, 0.65, 0.7, 0.75, 0.8, 0.9), LENGTHS[length], strict=True):
        assert acceptance_length(acceptance=acceptance, length=length) == pytest.approx(expected, abs=0.0051)
        independent = survival_length(survival([acceptance] * length))
        assert independent == pytest.approx(acceptance_length(acceptance=acceptance, length=length))


def test_every_pass_counts_in_the_measured_length():
    assert mean_acceptance_length(accepted=4, passes=4) == 2.0
    assert mean_acceptance_length(accepted=0, passes=3) == mean_acceptance_length(accepted=0, passes=0) == 1.0


def test_certain_and_impossible_drafts():
    assert acceptance_length(acceptance=1.0, length=4) == 5
    assert acceptance_length(acceptance=0.0, length=4) == 1
    assert acceptance_length(acceptance=0.5, length=0) == 1


@pytest.mark.parametrize("run", MEASURED)
def test_moesd_speedups(run: str):
    length, found_sigma, measured, cost = MEASURED[run]
    tokens = found_sigma * (length + 1)
    assert speedup(acceptance_length=tokens, verify_ratio=cost - 0.27, draft_cost=0.2, overhead=0.07) == pytest.approx(
        measured, abs=0.015
    )


def test_target_efficiency_is_the_inverse_of_the_verify_cost():
    assert target_efficiency(plain_time_s=2.0, verify_time_s=2.5) == 0.8
    ratio = 1 / target_efficiency(plain_time_s=2.0, verify_time_s=2.5)
    assert speedup(acceptance_length=2.5, verify_ratio=ratio) == 2.0
    with pytest.raises(ConfigError, match="times must be positive"):
        target_efficiency(plain_time_s=0.0, verify_time_s=1.0)


def test_survival_needs_no_independence():
    """Qwen3-Next with a tuned head reports .912, .776, .616 per position: 3.30 tokens per pass."""
    assert survival_length([0.912, 0.776, 0.616]) == pytest.approx(3.304)
    assert survival([0.5, 0.5, 0.0]) == [0.5, 0.25, 0.0]
    assert survival_length([]) == 1
    with pytest.raises(ConfigError, match="cannot rise"):
        survival_length([0.5, 0.6])
    with pytest.raises(ConfigError, match="survival must be from 0 to 1"):
        survival_length([1.5])


def test_break_even():
    """Qwen3-30B-A3B at B = 1, K = 3 with a perfect kernel: 2.58 plain steps need 2.58 tokens, acceptance .71."""
    assert break_even_acceptance(cost=2.58, length=3) == pytest.approx(0.714, abs=0.002)
    assert break_even_acceptance(cost=1.5, length=1) == pytest.approx(0.5)
    assert break_even_acceptance(cost=0.9, length=3) == 0
    assert break_even_acceptance(cost=4.01, length=3) is None


@pytest.mark.parametrize("bad", [{"num_experts": 4, "top_k": 5}, {"num_experts": 4, "top_k": 0}])
def test_impossible_sizes(bad: dict[str, int]):
    with pytest.raises(ConfigError, match="top_k must be from 1"):
        expected_experts(**bad, tokens=1)


def test_impossible_lengths():
    with pytest.raises(ConfigError, match="at least one draft"):
        break_even_acceptance(cost=1.5, length=0)
    with pytest.raises(ConfigError, match="share must be between"):
        saturation_tokens(num_experts=8, top_k=2, share=1.0)
