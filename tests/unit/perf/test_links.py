"""Collectives within a node and beyond it, and the time that both links take together."""

import math

import pytest

from jaxspec.perf.cost import Mesh, Rates
from jaxspec.perf.links import Collective, collectives, link_time
from tests.unit.perf.models import dense_model, routed_model

ONE = 2 * 10 * (1 - (3 / 4) ** 2)  # bytes of a vector, times the chance that one of 2 experts lies on one of 4 devices


def test_peers_of_the_same_node_are_near():
    assert collectives(routed_model(), 1, Mesh(expert=4), 8) == [Collective("exchange", 6, 3 * ONE, 0)]
    assert collectives(routed_model(), 1, Mesh(expert=4), 2) == [Collective("exchange", 6, ONE, 2 * ONE)]
    (exchange, total) = collectives(routed_model(), 5, Mesh(expert=4, tensor=2), 4)
    assert (exchange.near_bytes, exchange.far_bytes) == pytest.approx((5 * ONE, 10 * ONE)), "two of a node's four"
    assert total == Collective("sum", 6, 5 * 20.0, 0)


def test_a_tensor_axis_over_several_nodes_is_as_slow_as_their_network():
    assert collectives(dense_model(), 1, Mesh(tensor=4), 2) == [Collective("sum", 4, 0, 30.0)]


def test_the_slower_of_both_links_counts():
    rates = Rates(link_s=1, network_s=3, link_byte_s=1, network_byte_s=10, node=2)
    assert link_time(routed_model(), rates, 1, Mesh(expert=4)) == pytest.approx(6 * (3 + 20 * ONE))
    assert link_time(routed_model(), rates, 1, Mesh(expert=2)) == pytest.approx(6 * (1 + 20 * 0.75))
    nowhere = Rates(link_byte_s=1, network_byte_s=math.inf)
    assert link_time(routed_model(), nowhere, 1, Mesh(expert=4)) == pytest.approx(6 * 3 * ONE)
