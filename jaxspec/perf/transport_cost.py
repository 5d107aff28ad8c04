"""Costs of the ways to bring rows to the devices that hold their experts, and the choice of the cheapest.

The names are those of ``jaxspec/nn/expert_transport.py``: ``sum`` has all rows everywhere: every device also
computes attention for all of them and adds up the experts' outputs once per layer; ``padded`` and ``ragged`` give each
device rows of its own and exchange them twice per layer, with room for every row or only those that go.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import Mesh, ModelCost, Rates
from jaxspec.perf.links import CHOICE_BYTES, SENT_BYTES, SUM_BYTES, chance_of_a_device
from jaxspec.perf.pass_time import smooth_max

Transport = Literal["sum", "padded", "ragged"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


@dataclass(frozen=True)
class Pass:
    """The part of one pass of a model over a batch that depends on the transport.

    Attributes:
      rows: B, of the whole batch.
      positions: of each row, K + 1.
      model_dim, top_k: D and A.
      routed_layers: that exchange.
      dense_flops: of one position, all layers: what is not a routed expert.
      dense_bytes: of these weights, which a device reads once whatever its rows.
      row_bytes: of the caches that attention reads for one row.
    """

    rows: int
    positions: int
    model_dim: int
    top_k: int
    routed_layers: int
    dense_flops: float = 0.0
    dense_bytes: float = 0.0
    row_bytes: float = 0.0


def pass_of(model: ModelCost, rows: int, positions: int, context: int) -> Pass:
    """Returns the pass of a model whose costs are known."""
    layers, routed = model.layers, model.routed
    read = sum(x.count * c.entry_bytes * c.entries(positions, context) for x in layers for c in x.caches)
    flops = model.head_flops + sum(
        x.count * (x.dense_flops + sum(c.flops(positions, context) for c in x.caches) / positions) for x in layers
    )
    return Pass(
        rows, positions, model.model_dim, routed.top_k if routed else 0, model.routed_layers, flops, model.dense_bytes,
        read,
    )  # fmt: skip


def transport_times(one: Pass, mesh: Mesh, rates: Rates) -> dict[Transport, float]:
    """Computes the seconds that depend on transport; exchanges only if each device can have rows of its own."""
    even = mesh.expert > 1 and one.rows % (mesh.data * mesh.expert) == 0
    possible = TRANSPORTS if even else ("sum",)
    return {transport: _time(transport, one, mesh, rates) for transport in possible}


def choose(
    one: Pass, mesh: Mesh, rates: Rates, supported: Collection[Transport] = TRANSPORTS
) -> tuple[Transport, Mapping[Transport, float]]:
    """Chooses the cheapest transport that the backend has; also returns the seconds of each."""
    if unknown := sorted(set(supported) - set(TRANSPORTS)):
        raise ConfigError(f"transport: {', '.join(unknown)} are not known; known are {', '.join(TRANSPORTS)}")
    possible: dict[Transport, float] = transport_times(one, mesh, rates)
    for transport in set(TRANSPORTS) - {"sum", *supported}:
        possible.pop(transport, None)
    return min(possible, key=lambda transport: possible[transport]), possible


def _time(transport: Transport, one: Pass, mesh: Mesh, rates: Rates) -> float:
    rows = math.ceil(one.rows / (mesh.data if transport == "sum" else mesh.data * mesh.expert))
    local = rows * one.positions
    read, products = one.dense_bytes / mesh.tensor, local * one.dense_flops / mesh.tensor
    computing = smooth_max(read * rates.byte_s, products * rates.flop_s, rates.sharpness) if read or products else 0.0
    return (
        computing
        + rows * one.row_bytes * rates.kv_byte_s
        + one.routed_layers * _layer(transport, one, local, mesh, rates)
    )


def _layer(transport: Transport, one: Pass, local: int, mesh: Mesh, rates: Rates) -> float:
    """Computes one layer's collectives; a device sends to ``near`` others of its node and to ``far`` ones beyond."""
    if mesh.expert == 1:
        return 0.0
    near = min(mesh.expert, max(rates.node // mesh.tensor, 1)) - 1
    far = mesh.expert - 1 - near
    latency = rates.network_s if far else rates.link_s
    if transport == "sum":
        ring = 2 * (mesh.expert - 1) / mesh.expert * SUM_BYTES * one.model_dim * local
        return latency + ring * (rates.network_byte_s if far else rates.link_byte_s)
    goes = 1.0 if transport == "padded" else chance_of_a_device(mesh.expert, one.top_k)
    there = SENT_BYTES * one.model_dim + CHOICE_BYTES * one.top_k
    total = latency if transport == "ragged" else 0.0  # counts go ahead
    for size in (there, SUM_BYTES * one.model_dim):
        each = goes * local * size
        total += latency + max(near * each * rates.link_byte_s, far * each * rates.network_byte_s if far else 0.0)
    return total
