"""Routed experts as two kernels: gate, up and activation in one, down and combine weight in the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, when, whole
from pallas_kernels.product import Layout, Product, layout, planes, products, references, tile_of
from pallas_kernels.quantized import Quantized, Weight
from pallas_kernels.row_blocks import Blocks, sort


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of both products.

    Attributes:
      rows: of a block, 16 or 32 for any number of rows up to 512, so that a row's sums do not depend on it.
      up: of the product with gate and up weights; its columns are read from both.
      down: of the product back to the model width.
    """

    rows: int = 16
    up: Product = field(default_factory=Product)
    down: Product = field(default_factory=Product)


@dataclass(frozen=True)
class _Body:
    """Static facts of one of the two kernels."""

    rows: int
    top_k: int
    facts: Layout
    tile: Product
    dtype: jnp.dtype
    stacked: bool
    biased: bool
    activation: Callable[[jax.Array, jax.Array], jax.Array] | None = None


def routed_experts(
    x: jax.Array,
    expert_MA: jax.Array,
    weight_MA: jax.Array,
    weights: Mapping[str, Weight],
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    dtype: jnp.dtype,
    layer: jax.Array | None,
    tiles: Tiles,
    implementation: Implementation,
    sorted_rows: tuple[jax.Array, Blocks] | None,
) -> jax.Array:
    """As ``api.routed_experts``."""
    rows, top_k = expert_MA.shape
    lead = 1 if layer is None else 2
    place = jnp.zeros(1, jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)
    on_gpu = implementation == "triton"
    up, down = (layout(weights[name], lead=lead, on_gpu=on_gpu) for name in ("gate_up_ED2F", "down_EFD"))
    experts, width = weights["down_EFD"].shape[lead - 1], down.columns
    if sorted_rows is None:
        sorted_rows = sort(expert_MA.reshape(-1), experts, tiles.rows, implementation)
    order_R, blocks = sorted_rows
    common = [place, blocks.group_N, blocks.first_N, blocks.count_N, order_R]
    make = partial(_Body, tiles.rows, top_k, dtype=dtype, stacked=layer is not None)
    run = partial(_run, blocks=blocks, implementation=implementation)
    gate_up_bias, down_bias = (_bias(weights, name) for name in ("gate_up_bias_E2F", "down_bias_ED"))

    hidden_PRX = run(
        _gate_up,
        make(facts=up, tile=tiles.up, biased=gate_up_bias is not None, activation=activation),
        [*common, planes(x.astype(dtype), up.planes) if x.ndim == 2 else x],
        weights["gate_up_ED2F"],
        gate_up_bias,
        jax.ShapeDtypeStruct((down.planes, rows * top_k, up.columns // down.planes), dtype),
    )
    y_RD = run(
        _down,
        make(facts=down, tile=tiles.down, biased=down_bias is not None),
        [*common, hidden_PRX, weight_MA.astype(jnp.float32).reshape(-1)],
        weights["down_EFD"],
        down_bias,
        jax.ShapeDtypeStruct((rows * top_k, width), jnp.float32),
    )
    return combined(y_RD.reshape(rows, top_k, width), (expert_MA >= 0) & (expert_MA < experts))


def _bias(weights: Mapping[str, Weight], name: str) -> jax.Array | None:
    bias = weights.get(name)
    assert not isinstance(bias, Quantized), "biases are plain"
    return bias


def combined(y_MAD: jax.Array, known_MA: jax.Array) -> jax.Array:
    """Sum of each row's outputs in order of preference; what no expert computed is undefined and left out."""
    y_MAD = jnp.where(known_MA[..., None], y_MAD, 0)
    total = y_MAD[:, 0]
    for a in range(1, y_MAD.shape[1]):
        total = total + y_MAD[:, a]
    return total


def _run(
    body: Callable[..., None],
    facts: _Body,
    rows: Sequence[jax.Array],
    weight: Weight,
    bias: jax.Array | None,
    out: jax.ShapeDtypeStruct,
    *,
    blocks: Blocks,
    implementation: Implementation,
) -> jax.Array:
    operands = [*rows, *references(weight), *([] if bias is None else [bias])]
    tile = facts.tile
    return launch(
        partial(body, facts),
        *operands,
        name=f"experts{body.__name__}",
        grid=(-(-facts.facts.columns // tile.columns), blocks.group_N.shape[0]),
        in_specs=[whole(operand.shape) for operand in operands],
        out_specs=whole(out.shape),
        out_shape=out,
        how=Launch(tile.num_warps, tile.num_stages),
        implementation=implementation,
    )


def _gate_up(body: _Body, layer_ref, group_ref, first_ref, count_ref, order_ref, x_ref, *refs: Any):
    """One block of rows and one tile of hidden columns."""
    *weight_refs, hidden_ref = refs
    across, n = program_id(0), program_id(1)
    count = count_ref[n]

    @when(count > 0)
    def _():
        lane = jnp.arange(body.rows, dtype=jnp.int32)
        place, own = first_ref[n] + lane, lane < count
        row = load(order_ref.at[place], mask=own, other=0) // body.top_k
        lead = _lead(body, layer_ref, group_ref[n])
        x_tile = tile_of(x_ref, row, own, body.facts)
        sums = products(x_tile, weight_refs, body.facts, lead, ((0,), (1,)), across, body.tile, body.rows)
        for lane, both in enumerate(zip(*sums, strict=True)):
            unit = body.facts.column(across * body.tile.columns, lane, body.tile.columns)
            gate, up = (_biased(part, weight_refs[-1], (*lead, j), unit, body) for j, part in enumerate(both))
            assert body.activation is not None, "the kernel of gate and up has one"
            hidden = body.activation(gate, up).astype(body.dtype)
            halves = hidden_ref.shape[0]
            mask = own[:, None] & (unit < body.facts.columns)[None]
            store(hidden_ref.at[(unit % halves)[None], place[:, None], (unit // halves)[None]], hidden, mask=mask)


def _down(body: _Body, layer_ref, group_ref, first_ref, count_ref, order_ref, hidden_ref, weight_ref, *refs: Any):
    """One block of rows and one tile of model columns; each row goes to its own place in the routed order."""
    *weight_refs, y_ref = refs
    across, n = program_id(0), program_id(1)
    count = count_ref[n]

    @when(count > 0)
    def _():
        lane = jnp.arange(body.rows, dtype=jnp.int32)
        place, own = first_ref[n] + lane, lane < count
        # Behind the last row, so that even where a masked store is a read and a write they do not meet a row's own.
        routed = load(order_ref.at[place], mask=own, other=y_ref.shape[0])
        lead = _lead(body, layer_ref, group_ref[n])
        x_tile = tile_of(hidden_ref, place, own, body.facts)
        (sums,) = products(x_tile, weight_refs, body.facts, lead, ((),), across, body.tile, body.rows)
        weight = load(weight_ref.at[routed], mask=own, other=0.0)[:, None]
        for lane, y in enumerate(sums):
            unit = body.facts.column(across * body.tile.columns, lane, body.tile.columns)
            y = _biased(y, weight_refs[-1], lead, unit, body) * weight
            mask = own[:, None] & (unit < body.facts.columns)[None]
            store(y_ref.at[routed[:, None], unit[None]], y, mask=mask)


def _lead(body: _Body, layer_ref, group) -> tuple[Any, ...]:
    return (layer_ref[0], group) if body.stacked else (group,)


def _biased(y: jax.Array, ref, lead: tuple[Any, ...], unit: jax.Array, body: _Body) -> jax.Array:
    if not body.biased:
        return y
    place = ref.at[(*lead, unit)]
    exact = body.facts.columns % body.tile.columns == 0
    bias = load(place) if exact else load(place, mask=unit < body.facts.columns, other=0.0)
    return y + bias[None].astype(jnp.float32)
