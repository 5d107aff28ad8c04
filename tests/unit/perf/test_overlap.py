"""Overlap of routed experts: what is published, and counting real ids."""

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.moesd import expected_experts
from jaxspec.perf.overlap import AssumedOverlap, MeasuredOverlap, measure_overlap


@pytest.mark.parametrize(("positions", "measured"), [(4, 22), (8, 36), (16, 56)])
def test_one_number_fits_a_published_decline(positions: int, measured: int):
    """Qwen3.6-35B-A3B, 8 of 256 experts."""
    assert AssumedOverlap(0.72).touched(256, 8, 1, positions) == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("experts", "top_k", "share", "measured"), [(128, 8, 0.82, 23.85), (128, 4, 0.77, 11.75)])
def test_published_counts_of_four_positions(experts: int, top_k: int, share: float, measured: float):
    """EcoSpec's Qwen3-235B and gpt-oss-120b."""
    assert AssumedOverlap(share).touched(experts, top_k, 1, 4) == pytest.approx(measured, rel=0.02)


def test_independent_routing_is_the_upper_bound():
    for rows, positions in ((1, 1), (1, 4), (8, 4), (64, 8)):
        independent = expected_experts(num_experts=64, top_k=8, tokens=rows * positions)
        assert AssumedOverlap(1.0).touched(64, 8, rows, positions) == pytest.approx(independent)
        assert 8 <= AssumedOverlap(0.5).touched(64, 8, rows, positions) <= independent


def test_a_row_that_touches_all_experts_leaves_none_to_others():
    assert AssumedOverlap(1.0).touched(8, 2, 4, 8192) == 8


def test_rows_are_independent_of_each_other():
    plain = AssumedOverlap(0.7).touched(64, 8, 16, 1)
    assert plain == pytest.approx(expected_experts(num_experts=64, top_k=8, tokens=16))
    # Two rows that each touch half of the experts touch three quarters together.
    half = AssumedOverlap(0.5 / (1 - 0.75**4))
    assert half.touched(8, 2, 1, 4) == pytest.approx(4)
    assert half.touched(8, 2, 2, 4) == pytest.approx(6)


def test_a_dense_layer_has_one_expert():
    assert AssumedOverlap(0.7).touched(1, 1, 4, 4) == 1


def test_measured_shares_are_interpolated_and_clipped():
    found = MeasuredOverlap((1, 4), (1, 4), (((1.0, 0.6), (0.9, 0.5)),))
    most = expected_experts(num_experts=64, top_k=8, tokens=4)
    assert found.touched(64, 8, 1, 4) == pytest.approx(0.6 * most)
    assert found.touched(64, 8, 2, 2) == pytest.approx(most * (1.0 + 0.6 + 0.9 + 0.5) / 4)
    far = expected_experts(num_experts=64, top_k=8, tokens=128)
    assert found.touched(64, 8, 16, 8) == pytest.approx(0.5 * far), "the nearest cell counts outside"
    assert MeasuredOverlap((1,), (1,), (((0.01,),),)).touched(64, 8, 1, 1) == 8, "never fewer than one token's"


def test_counting_ids_that_never_change():
    same = np.tile(np.asarray([3, 5]), (4, 20, 1))
    found = measure_overlap([same], [16], rows=[1, 2], positions=[1, 4])
    for rows, positions in ((1, 1), (2, 1), (1, 4), (2, 4)):
        assert found.touched(16, 2, rows, positions) == pytest.approx(2)


def test_counting_independent_ids_finds_the_independent_count():
    generator = np.random.default_rng(0)
    ids = np.argsort(generator.random((8, 200, 32)), axis=-1)[..., :4]
    found = measure_overlap([ids, ids], [32, 32], rows=[1, 4], positions=[1, 2, 8])
    assert np.allclose(found.share, 1.0, atol=0.03)
    assert len(found.share) == 2


def test_bad_tables():
    with pytest.raises(ConfigError, match="too short for 8 positions"):
        measure_overlap([np.zeros((2, 4, 2), int)], [8], rows=[1], positions=[8])
    with pytest.raises(ConfigError, match="ascending rows"):
        MeasuredOverlap((2, 1), (1,), (((1.0,), (1.0,)),))
    with pytest.raises(ConfigError, match="four positions touch"):
        AssumedOverlap(1.2)
