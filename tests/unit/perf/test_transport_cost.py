"""The cheapest way to the experts by made-up numbers: each wins where it should, and prices move the right way."""

from dataclasses import replace

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import Mesh, Rates
from jaxspec.perf.transport_cost import Pass, choose, pass_of, transport_times
from tests.unit.perf.models import routed_model

EIGHT = Mesh(expert=8)
ONE = Pass(rows=64, positions=1, model_dim=1000, top_k=2, routed_layers=10)
LINKS = Rates(link_byte_s=1e-9, link_s=1e-6)


def test_few_bytes_are_summed_for_that_takes_one_round():
    times = transport_times(replace(ONE, model_dim=1), EIGHT, LINKS)
    assert times["sum"] < times["padded"] < times["ragged"], "whose counts go ahead"
    assert choose(replace(ONE, model_dim=1), EIGHT, LINKS)[0] == "sum"


def test_rows_of_one_s_own_spare_the_attention_of_all_others():
    caches = replace(ONE, row_bytes=1e6)
    rates = replace(LINKS, kv_byte_s=1e-9)
    assert choose(caches, EIGHT, rates)[0] == "ragged"
    assert choose(caches, EIGHT, rates, ("sum", "padded"))[0] == "padded"
    times = transport_times(replace(caches, top_k=200), EIGHT, replace(rates, link_s=0))
    assert times["padded"] == pytest.approx(times["ragged"]), "who chooses all devices needs the worst case's bytes"


def test_a_worst_case_of_many_devices_costs_more_than_adding_up():
    """Eight rows each, 16 devices: a ring carries 2 * 4 * 128 vectors' bytes, the padded exchanges 6 * 15 * 8."""
    slow = replace(LINKS, link_s=0)
    times = transport_times(replace(ONE, rows=128), Mesh(expert=16), replace(slow, node=16))
    assert times["ragged"] < times["padded"] < times["sum"]
    far = transport_times(replace(ONE, rows=128), Mesh(expert=16), replace(slow, network_byte_s=1e-8, node=8))
    assert far["sum"] / times["sum"] == pytest.approx(10), "a ring is as fast as its slowest link"
    assert far["padded"] / times["padded"] == pytest.approx(10 * 8 / 15)


def test_prices_by_hand():
    times = transport_times(ONE, EIGHT, LINKS)
    chance = 1 - (7 / 8) ** 2
    assert times["sum"] == pytest.approx(10 * (1e-6 + 2 * 7 / 8 * 4 * 1000 * 64 * 1e-9))
    assert times["padded"] == pytest.approx(10 * (2e-6 + 7 * 8 * (2016 + 4000) * 1e-9))
    assert times["ragged"] == pytest.approx(10 * (3e-6 + 7 * 8 * chance * (2016 + 4000) * 1e-9))


@pytest.mark.parametrize("field", ["rows", "positions", "model_dim", "top_k", "routed_layers", "row_bytes"])
def test_nothing_gets_cheaper_by_being_more(field: str):
    rates, one = replace(LINKS, kv_byte_s=1e-9, flop_s=1e-12), replace(ONE, row_bytes=10.0, dense_flops=1e6)
    less, more = (transport_times(replace(one, **{field: getattr(one, field) * n}), EIGHT, rates) for n in (1, 2))
    assert all(less[name] <= more[name] for name in less)
    assert less["ragged"] < more["ragged"]


def test_rows_that_the_devices_do_not_divide_are_summed():
    assert list(transport_times(replace(ONE, rows=12), EIGHT, LINKS)) == ["sum"]
    assert choose(replace(ONE, row_bytes=1e9), Mesh(data=8), replace(LINKS, kv_byte_s=1e-9))[0] == "sum"
    with pytest.raises(ConfigError, match="ring are not known; known are sum, padded, ragged"):
        choose(ONE, EIGHT, LINKS, ("ring",))


def test_a_model_s_pass():
    one = pass_of(routed_model(), rows=8, positions=2, context=100)
    assert (one.top_k, one.routed_layers, one.dense_bytes) == (2, 3, 3500.0)
    assert one.row_bytes == 3 * 4.0 * 102
    assert one.dense_flops == pytest.approx(500 + 3 * (1000 + 8 * 100))
