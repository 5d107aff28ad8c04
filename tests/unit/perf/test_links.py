"""Collectives within a node and beyond it, and the time that both links take together."""

import math

import pytest

from jaxspec.perf.cost import Mesh, Rates
from jaxspec.perf.links import Collective, collectives, link_time
from tests.unit.perf.models import dense_model, routed_model

GOES = 1 - (3 / 4) ** 2  # the chance that one of 2 experts lies on one of 4 devices
THERE, BACK = GOES * (2 * 10 + 2 * 8), GOES * 4 * 10  # a vector of bfloat16 with 2 choices, one of float32


def test_peers_of_the_same_node_are_near():
    near = [Collective("exchange", 3, 3 * one, 0) for one in (THERE, BACK)]
    assert collectives(routed_model(), 1, Mesh(expert=4), 8) == near
    far = [Collective("exchange", 3, one, 2 * one) for one in (THERE, BACK)]
    assert collectives(routed_model(), 1, Mesh(expert=4), 2) == far
    (there, back, total) = collectives(routed_model(), 5, Mesh(expert=4, tensor=2), 4)
    assert (there.near_bytes, there.far_bytes) == pytest.approx((5 * THERE, 10 * THERE)), "two of a node's four"
    assert (back.near_bytes, back.far_bytes) == pytest.approx((5 * BACK, 10 * BACK))
    assert total == Collective("sum", 6, 5 * 40.0, 0)


def test_a_tensor_axis_over_several_nodes_is_as_slow_as_their_network():
    assert collectives(dense_model(), 1, Mesh(tensor=4), 2) == [Collective("sum", 4, 0, 60.0)]


def test_the_slower_of_both_links_counts():
    rates = Rates(link_s=1, network_s=3, link_byte_s=1, network_byte_s=10, node=2)
    assert link_time(routed_model(), rates, 1, Mesh(expert=4)) == pytest.approx(6 * 3 + 3 * 20 * (THERE + BACK))
    assert link_time(routed_model(), rates, 1, Mesh(expert=2)) == pytest.approx(6 * 1 + 3 * 0.75 * (36 + 40))
    nowhere = Rates(link_byte_s=1, network_byte_s=math.inf)
    assert link_time(routed_model(), nowhere, 1, Mesh(expert=4)) == pytest.approx(3 * 3 * (THERE + BACK))
