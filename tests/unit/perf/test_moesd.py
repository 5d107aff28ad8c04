"""MoESD's formulas against published and derived tables."""

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.moesd import acceptance_length, expected_experts, saturation_tokens, speedup, tokens_per_expert

# top_k, experts: tokens that saturate 95 % and 90 %; experts touched by 1, 2, 4, 8, 16, 32 tokens
TABLE = {
    (2, 8): (11, 9, [2, 3.5, 5.5, 7.2, 7.9, 8.0]),
    (8, 64): (23, 18, [8, 15.0, 26.5, 42.0, 56.4, 63.1]),
    (8, 128): (47, 36, [8, 15.5, 29.1, 51.6, 82.4, 112]),
    (4, 128): (95, 73, [4, 7.9, 15.3, 28.7, 51, 82]),
    (8, 256): (95, 73, [8, 15.8, 30.5, 57.4, 102, 163]),
    (10, 512): (152, 117, [10, 19.8, 38.8, 74.7, 139, 240]),
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


@pytest.mark.parametrize(
    ("acceptance", "length", "expected"),
    [(0.57, 3, 2.08), (0.75, 5, 3.29), (0.8, 1, 1.80), (0.9, 7, 5.70), (0.0, 4, 1.0), (1.0, 4, 5.0)],
)
def test_acceptance_length(acceptance: float, length: int, expected: float):
    assert acceptance_length(acceptance=acceptance, length=length) == pytest.approx(expected, abs=0.005)


def test_speedup_is_acceptance_over_cost():
    # MoESD's Qwen2-57B-A14B run: sigma 0.90 at gamma 4 commits 4.5 tokens and gives 2.29 at a cost of 1.97 steps.
    assert speedup(acceptance_length=4.5, verify_ratio=1.7, draft_cost=0.2, overhead=0.07) == pytest.approx(
        2.29, abs=0.01
    )


@pytest.mark.parametrize("bad", [{"num_experts": 4, "top_k": 5}, {"num_experts": 4, "top_k": 0}])
def test_impossible_sizes(bad: dict[str, int]):
    with pytest.raises(ConfigError, match="top_k must be from 1"):
        expected_experts(**bad, tokens=1)
