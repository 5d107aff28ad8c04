"""Routed experts by Mosaic GPU: the same two launches, with rows gathered before them and put together after."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import COLUMNS, BlockProduct, Tile, block_products
from pallas_kernels.quantized import Weight, form
from pallas_kernels.routed_experts.kernel import combined
from pallas_kernels.row_blocks import Blocks, sort

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


@dataclass(frozen=True)
class MosaicTiles:
    """Tile sizes of both products.

    Attributes:
      rows: of a block, a multiple of 64; a row's bits do not depend on it.
      up: of the product with gate and up weights; its columns are read from both.
      down: of the product back to the model width.
    """

    rows: int = 64
    up: Tile = field(default_factory=Tile)
    down: Tile = field(default_factory=lambda: Tile(columns=256))


def obstacles(weights: Mapping[str, Weight], dtype: jnp.dtype) -> list[str]:
    """Returns why this kernel cannot compute with these weights, each a sentence; empty if it can."""
    reasons = mosaic.obstacles()
    if dtype != BFLOAT16:
        reasons.append(f"products of {dtype}: the Mosaic kernel multiplies bfloat16 alone")
    for name in ("gate_up_ED2F", "down_EFD"):
        if form(weights[name]) != "bfloat16":
            reasons.append(f"{name}: {form(weights[name])}, the Mosaic kernel reads plain bfloat16 alone")
    hidden, width = weights["down_EFD"].shape[-2:]
    for axis, size in (("model width", width), ("hidden units", hidden)):
        if size % COLUMNS:
            reasons.append(f"{axis}: {size}, not a multiple of {COLUMNS}")
    return reasons


def routed_experts(
    x: jax.Array,
    expert_MA: jax.Array,
    weight_MA: jax.Array,
    weights: Mapping[str, Weight],
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    layer: jax.Array | None,
    tiles: MosaicTiles,
    interpret: bool,
    sorted_rows: tuple[jax.Array, Blocks] | None,
) -> jax.Array:
    """As ``api.routed_experts``; sorting, gathering and the sum over a row's experts are XLA's."""
    (rows, top_k), routed = expert_MA.shape, expert_MA.size
    plain: Mapping[str, Any] = weights
    experts, hidden, width = plain["down_EFD"].shape[-3:]
    if sorted_rows is None:
        sorted_rows = sort(expert_MA.reshape(-1), experts, tiles.rows, "xla")
    # Otherwise XLA computes the blocks again in every kernel that reads them, in too many registers.
    order_R, blocks = lax.optimization_barrier(sorted_rows)
    group_N = blocks.group_N if layer is None else layer.astype(jnp.int32) * experts + blocks.group_N
    lane = jnp.arange(tiles.rows, dtype=jnp.int32)
    place_NX = jnp.minimum(blocks.first_N[:, None] + lane, routed - 1)
    routed_S = jnp.where(lane < blocks.count_N[:, None], order_R[place_NX], routed).reshape(-1)
    known_S = jnp.minimum(routed_S, routed - 1)
    hidden_SF = block_products(
        BlockProduct("experts_gate_up", tiles.rows, width, hidden, 2, fitting(tiles.up, hidden), BFLOAT16, activation),
        group_N,
        blocks.count_N,
        x.reshape(rows, width).astype(BFLOAT16)[known_S // top_k],
        plain["gate_up_ED2F"],
        plain.get("gate_up_bias_E2F"),
        interpret=interpret,
    )
    y_SD = block_products(
        BlockProduct("experts_down", tiles.rows, hidden, width, 1, fitting(tiles.down, width), FLOAT32, lambda y: y),
        group_N,
        blocks.count_N,
        hidden_SF,
        plain["down_EFD"],
        plain.get("down_bias_ED"),
        weight_MA.astype(jnp.float32).reshape(-1)[known_S],
        interpret=interpret,
    )
    slot_R = jnp.zeros(routed, jnp.int32).at[routed_S].set(jnp.arange(len(routed_S), dtype=jnp.int32), mode="drop")
    return combined(y_SD[slot_R].reshape(rows, top_k, width), (expert_MA >= 0) & (expert_MA < experts))


def fitting(tile: Tile, columns: int) -> Tile:
    """Returns the widest tile, up to the given one, of which the columns are a multiple."""
    return replace(tile, columns=math.gcd(tile.columns, columns))
