"""Routed experts of many rows: some rows at a time, and their products in groups of rows with one expert."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.nn.router import Routing
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from pallas_kernels.few_rows_dense.api import flat
from pallas_kernels.grouped_matmul.api import grouped_matmul, obstacles
from pallas_kernels.quantized import Weight
from pallas_kernels.select import Choice

MOST_ROWS = 8192  # that experts compute at a time; their hidden units take memory by choice and not by row


def in_parts(
    compute: Callable[[Array, Routing, Array | None], Array], x: Array, routing: Routing, live: Array | None
) -> Array:
    """Computes experts for at most ``MOST_ROWS`` rows at a time.

    Args:
      compute: takes rows, their choices, of which negative ones count as none, and which rows or choices count, and
        returns [M, D].
      x: rows [M, D], or where they are few as ``compute`` takes them.
      routing: their choices.
      live: rows [M] or choices [M, A] that are computed, None for all; the others give zeros.
    """
    rows = len(routing.expert_MA)
    if rows <= MOST_ROWS:
        return compute(x, routing, live)
    parts = -(-rows // MOST_ROWS)
    expert_MA = routing.expert_MA
    if live is not None:
        expert_MA = jnp.where(live if live.ndim == 2 else live[:, None], expert_MA, -1)
    each = x, expert_MA, routing.weight_MA

    def some(part: tuple[Array, Array, Array]) -> Array:
        x, choices, weights = part
        return compute(x, replace(routing, expert_MA=choices, weight_MA=weights), choices >= 0)

    return by_parts(some, each, -(-rows // parts))


def by_parts(compute: Callable[[Any], Array], each: Any, size: int) -> Array:
    """Computes something of at most ``size`` entries of the first axis at a time, again for its gradient.

    Entries that fill up the last part are 0 if float, and -1 if whole numbers.
    """
    count = jax.tree.leaves(each)[0].shape[0]
    if count <= size:
        return compute(each)
    parts = -(-count // size)

    def split(x: Array) -> Array:
        fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        padded = jnp.pad(x, [(0, parts * size - count), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
        return padded.reshape(parts, size, *x.shape[1:])

    out = lax.map(jax.checkpoint(compute), jax.tree.map(split, each))
    return out.reshape(parts * size, *out.shape[2:])[:count]


def grouped_experts(
    x_MD: Array,
    expert_MA: Array,
    weight_MA: Array,
    weights: Mapping[str, Weight],
    *,
    activation: Callable[[Array, Array], Array],
    dtype: jnp.dtype,
    layer: Array | None,
    implementation: Choice,
) -> Array:
    """As ``routed_experts``, by products of rows that lie sorted by expert; with gradients, where weights are plain."""
    (rows, top_k), flats = expert_MA.shape, _flat(weights, stacked=layer is not None)
    count, hidden = weights["down_EFD"].shape[-3:-1]
    flat_R = expert_MA.reshape(-1)
    flat_R = jnp.where((flat_R >= 0) & (flat_R < count), flat_R, count)
    order_R = jnp.argsort(flat_R, stable=True).astype(jnp.int32)
    size_E = jnp.zeros(count, jnp.int32).at[flat_R].add(1, mode="drop")
    sorted_R = jnp.minimum(flat_R[order_R], count - 1)

    def product(x_RX: Array, name: str, bias: str) -> Array:
        y = grouped_matmul(
            x_RX, size_E, flats[name], dtype=dtype, layer=layer, implementation=implementation.implementation
        )
        if bias not in weights:
            return y
        one: Any = weights[bias] if layer is None else weights[bias][layer]  # pyright: ignore[reportIndexIssue]
        return y + one.reshape(count, -1)[sorted_R].astype(jnp.float32)

    both = product(x_MD.astype(dtype)[order_R // top_k], "gate_up_ED2F", "gate_up_bias_E2F")
    y_RD = product(activation(both[:, :hidden], both[:, hidden:]).astype(dtype), "down_EFD", "down_bias_ED")
    known_R = flat_R[order_R] < count
    y_RD = jnp.where(known_R[:, None], y_RD * weight_MA.reshape(-1)[order_R, None].astype(jnp.float32), 0)
    place_R = jnp.zeros(rows * top_k, jnp.int32).at[order_R].set(jnp.arange(rows * top_k, dtype=jnp.int32))
    place_MA = place_R.reshape(rows, top_k)
    total = y_RD[place_MA[:, 0]]
    for a in range(1, top_k):
        total = total + y_RD[place_MA[:, a]]
    return total


def groupable(weights: Mapping[str, Weight], *, stacked: bool) -> bool:
    """Whether ``grouped_experts`` has kernels for these weights."""
    return all(w is not None and not obstacles(w) for w in _flat(weights, stacked=stacked).values())


def _flat(weights: Mapping[str, Weight], *, stacked: bool) -> dict[str, Any]:
    """Weights with all columns along one axis, None where scales do not allow it."""
    lead = 2 if stacked else 1
    return {name: flat(weights[name], lead, 1) for name in ("gate_up_ED2F", "down_EFD")}
