"""The model of step time, against sums made by hand."""

import math

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import (
    CacheCost,
    Mesh,
    Rates,
    busiest_share,
    byte_ratio,
    works,
)
from jaxspec.perf.links import link_time
from jaxspec.perf.overlap import AssumedOverlap, MeasuredOverlap
from jaxspec.perf.pass_time import smooth_max, step_time
from tests.unit.perf.models import dense_model, routed_model

BYTES = Rates(byte_s=1.0, expert_byte_s=1.0)  # seconds are bytes of weights and logits
SAMPLING = 8 * 4 * 50  # bytes of one position's logits


def test_weights_of_a_pass_are_dense_bytes_and_the_union_of_experts():
    model = routed_model()
    assert model.weight_bytes(1, 1) == 3 * (1000 + 2 * 200) + 500
    # Two tokens touch 8 (1 - .75^2) = 3.5 of 8 experts.
    assert model.weight_bytes(1, 2) == pytest.approx(3 * (1000 + 3.5 * 200) + 500)
    assert model.weight_bytes(2, 1) == model.weight_bytes(1, 2)
    assert byte_ratio(model, 1, 1) == pytest.approx(5600 / 4700)
    assert byte_ratio(dense_model(), 8, 5) == 1
    assert model.weight_bytes(1, 2, AssumedOverlap(0.64)) == pytest.approx(3 * (1000 + 3.5 * 0.8 * 200) + 500)


def test_a_step_adds_up():
    found = step_time(routed_model(), BYTES, rows=1, context=0)
    assert found.by_cause["dense"] == 3000
    assert found.by_cause["experts"] == pytest.approx(1200)
    assert found.by_cause["head"] == 500
    assert found.by_cause["sampling"] == SAMPLING
    assert found.by_cause["links"] == found.by_cause["kv"] == 0
    assert found.total_s == pytest.approx(3000 + 1200 + 500 + SAMPLING)


def test_caches_are_read_once_for_all_positions_of_a_row():
    rates = Rates(kv_byte_s=1.0)
    for positions in (1, 5):
        kv = step_time(dense_model(), rates, rows=3, positions=positions, context=100).by_cause["kv"]
        assert kv == 2 * 3 * 4 * (100 + positions)


def test_what_attention_reads_of_a_stream():
    assert CacheCost(1.0).entries(3, 100) == 103
    assert CacheCost(1.0, stride=4).entries(4, 100) == 26
    assert CacheCost(1.0, reach=9).entries(2, 100) == 11
    assert CacheCost(1.0, reach=9).entries(2, 4) == 6
    assert CacheCost(1.0, keeps=16).entries(2, 100) == 32, "queries keep different entries"
    assert CacheCost(1.0, keeps=16).entries(8, 100) == 108
    assert CacheCost(1.0, stride=4, keeps=2, entry_flops=3.0).flops(5, 100) == 5 * 3 * 2


def test_products_take_over_where_they_are_slower():
    rates = Rates(byte_s=1.0, flop_s=0.1)
    few = step_time(dense_model(), rates, rows=1).by_cause["dense"]
    many = step_time(dense_model(), rates, rows=100).by_cause["dense"]
    assert few == pytest.approx(2000, rel=1e-5)
    assert many == pytest.approx(2000 * 10, rel=1e-5)
    ridge = step_time(dense_model(), rates, rows=10).by_cause["dense"]
    assert ridge == pytest.approx(2000 * 2 ** (1 / 6))


@pytest.mark.parametrize(("x", "y", "expected"), [(3.0, 0.0, 3.0), (0.0, 0.0, 0.0), (1.0, 1.0, 2 ** (1 / 6))])
def test_smooth_max(x: float, y: float, expected: float):
    assert smooth_max(x, y) == pytest.approx(expected)
    assert smooth_max(y, x) == pytest.approx(expected)


def test_overheads():
    rates = Rates(fixed_s=1.0, layer_s=10.0, row_s=100.0, position_s=1000.0)
    assert step_time(dense_model(), rates, rows=3, positions=2).by_cause["fixed"] == 1 + 2 * 10 + 3 * 100 + 6 * 1000


def test_a_tensor_axis_splits_dense_weights_and_key_heads():
    one = step_time(dense_model(), Rates(byte_s=1.0, kv_byte_s=1.0), rows=1, context=100)
    two = step_time(dense_model(), Rates(byte_s=1.0, kv_byte_s=1.0), rows=1, context=100, mesh=Mesh(tensor=2))
    assert two.by_cause["dense"] == one.by_cause["dense"] / 2
    assert two.by_cause["kv"] == one.by_cause["kv"] / 2
    latent = step_time(routed_model(), Rates(kv_byte_s=1.0), rows=1, context=100, mesh=Mesh(tensor=2))
    assert latent.by_cause["kv"] == 3 * 4 * 101, "one shared key cannot be split"


def test_an_expert_axis_splits_rows_and_experts():
    found = step_time(routed_model(), BYTES, rows=64, mesh=Mesh(expert=4))
    assert found.by_cause["experts"] == pytest.approx(3 * 2 * 200, rel=1e-6), "all 8 experts are touched, 2 lie here"
    assert found.by_cause["sampling"] == 16 * SAMPLING
    assert found.by_cause["dense"] == 3000


def test_the_busiest_rank():
    assert busiest_share(8, 8, 4) == pytest.approx(2.0), "all are touched: no rank has more than another"
    assert busiest_share(8, 64, 1) == 8
    # 2 of 8 on 4 ranks: mean .5, variance .5 * .75 * 6 / 7
    assert busiest_share(2, 8, 4) == pytest.approx(0.5 + math.sqrt(2 * math.log(4) * 0.5 * 0.75 * 6 / 7))
    assert busiest_share(1, 64, 8) == 1


def test_verifying_more_drafts_takes_no_more_collectives():
    """One dispatch and one combine per expert layer whatever K; only bytes grow (the guides claim N rounds)."""
    mesh, start_only, bytes_only = Mesh(expert=4), Rates(link_s=1.0), Rates(link_byte_s=1.0)
    rounds = {k: link_time(routed_model(), start_only, k + 1, mesh) for k in (0, 1, 5, 8)}
    assert set(rounds.values()) == {2.0 * 3}
    plain, verify = (link_time(routed_model(), bytes_only, positions, mesh) for positions in (1, 6))
    assert verify == pytest.approx(6 * plain)
    # 3 other ranks, each missed by 2 chosen experts with (3/4)^2; there 2 bytes per channel and 8 per choice, back 4
    assert plain == pytest.approx(3 * (2 * 10 + 2 * 8 + 4 * 10) * 3 * (1 - 0.75**2))


def test_sums_over_the_tensor_axis():
    found = link_time(dense_model(), Rates(link_s=1.0, link_byte_s=1.0), 1, Mesh(tensor=4))
    assert found == pytest.approx(2 * 2 * (1 + 2 * 3 / 4 * 40))
    assert link_time(dense_model(), Rates(link_s=1.0, link_byte_s=1.0), 1, Mesh(data=8)) == 0


def test_measured_layers_count_one_by_one():
    share = (((1.0, 1.0),), ((0.5, 0.5),), ((0.75, 0.75),))
    found = works(routed_model(), rows=1, positions=4, overlap=MeasuredOverlap((1,), (1, 4), share))
    touched = [work.size_bytes / 200 for work in found if work.cause == "experts"]
    most = 8 * (1 - 0.75**4)
    assert touched == pytest.approx([most, 0.5 * most, 0.75 * most])


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(expert=3), "expert=3 does not divide 8 experts"),
        (Mesh(tensor=8), "tensor=8 does not divide 4 heads"),
    ],
)
def test_a_mesh_must_divide_the_model(mesh: Mesh, words: str):
    with pytest.raises(ConfigError, match=words):
        mesh.check(routed_model())


def test_bad_meshes_and_steps():
    with pytest.raises(ConfigError, match="needs routed experts, and dense has none"):
        Mesh(expert=2).check(dense_model())
    with pytest.raises(ConfigError, match="every axis needs at least one device"):
        Mesh(data=0)
    with pytest.raises(ConfigError, match="rows and positions are at least 1"):
        step_time(dense_model(), BYTES, rows=0)
