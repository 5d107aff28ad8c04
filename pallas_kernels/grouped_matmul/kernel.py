"""Grouped matrix product and its gradients as kernels."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, when, whole
from pallas_kernels.product import Layout, Product, layout, planes, products, references, tile_of
from pallas_kernels.quantized import Quantized, Weight, widen
from pallas_kernels.row_blocks import cut


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the product and of the gradient of its weights.

    Attributes:
      rows: of a block.
      product: of rows times a group's matrix, and of the gradient of rows.
      outer: of the gradient of weights; ``depth`` is how many rows one step of its loop sums over.
      outer_rows: of a tile of that gradient.
    """

    rows: int = 64
    product: Product = field(default_factory=lambda: Product(128, 64, 4, 4))
    outer: Product = field(default_factory=lambda: Product(128, 32, 4, 3))
    outer_rows: int = 64


@dataclass(frozen=True)
class Setting:
    """What is static about a call."""

    dtype: jnp.dtype
    tiles: Tiles
    implementation: Implementation


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul(
    setting: Setting, x_RK: jax.Array, size_E: jax.Array, w_EKN: Weight, layer: jax.Array | None
) -> jax.Array:
    """As ``api.grouped_matmul``."""
    lead = 1 if layer is None else 2
    return _product(setting, x_RK, size_E, w_EKN, layer, layout(w_EKN, lead=lead))


def _forward(setting: Setting, x_RK, size_E, w_EKN, layer):
    return grouped_matmul(setting, x_RK, size_E, w_EKN, layer), (x_RK, size_E, w_EKN, layer)


def _backward(setting: Setting, saved, grad_RN: jax.Array):
    x_RK, size_E, w, layer = saved
    grad, depth = grad_RN.astype(setting.dtype), x_RK.shape[1]
    if isinstance(w, Quantized):
        # Numbers in few bits have no gradient; that of the rows takes them widened.
        own = widen(w if layer is None else jax.tree.map(lambda leaf: leaf[layer], w)).astype(setting.dtype)
        grad_x = _product(setting, grad, size_E, own, None, Layout(grad.shape[1], depth, transposed=True))
        return grad_x.astype(x_RK.dtype), None, jax.tree.map(jnp.zeros_like, w), None
    grad_x = _product(setting, grad, size_E, w, layer, Layout(grad.shape[1], depth, transposed=True))
    grad_w = _outer(setting, x_RK.astype(setting.dtype), grad, size_E, w.dtype)
    if layer is not None:
        grad_w = jnp.zeros(w.shape, w.dtype).at[layer].set(grad_w)
    return grad_x.astype(x_RK.dtype), None, grad_w, None


grouped_matmul.defvjp(_forward, _backward)


def _product(
    setting: Setting, x_RK: jax.Array, size_E: jax.Array, w: Weight, layer: jax.Array | None, facts: Layout
) -> jax.Array:
    rows, tiles = x_RK.shape[0], setting.tiles
    place = jnp.zeros(1, jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)
    blocks = cut(size_E, rows, tiles.rows)
    x_PRK = planes(x_RK.astype(setting.dtype), facts.planes)
    operands = [place, blocks.group_N, blocks.first_N, blocks.count_N, x_PRK, *references(w)]
    y_RN = launch(
        partial(_multiply, facts, tiles, stacked=layer is not None),
        *operands,
        name="grouped_matmul",
        grid=(-(-facts.columns // tiles.product.columns), blocks.group_N.shape[0]),
        in_specs=[whole(operand.shape) for operand in operands],
        out_specs=whole((rows, facts.columns)),
        out_shape=jax.ShapeDtypeStruct((rows, facts.columns), jnp.float32),
        how=Launch(tiles.product.num_warps, tiles.product.num_stages),
        implementation=setting.implementation,
    )
    grouped_R = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(size_E)
    return jnp.where(grouped_R[:, None], y_RN, 0)


def _multiply(
    facts: Layout, tiles: Tiles, layer_ref, group_ref, first_ref, count_ref, x_ref, *refs: Any, stacked: bool
):
    """One block of rows and one tile of columns."""
    *weight_refs, y_ref = refs
    across, n = program_id(0), program_id(1)
    count = count_ref[n]

    @when(count > 0)
    def _():
        lane = jnp.arange(tiles.rows, dtype=jnp.int32)
        row, own = first_ref[n] + lane, lane < count
        lead = (layer_ref[0], group_ref[n]) if stacked else (group_ref[n],)
        x_tile = tile_of(x_ref, row, own, facts)
        (sums,) = products(x_tile, weight_refs, facts, lead, ((),), across, tiles.product, tiles.rows)
        for number, y in enumerate(sums):
            unit = facts.column(across * tiles.product.columns, number, tiles.product.columns)
            store(y_ref.at[row[:, None], unit[None]], y, mask=own[:, None] & (unit < facts.columns)[None])


def _outer(setting: Setting, x_RK: jax.Array, grad_RN: jax.Array, size_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[E, K, N]: sum of x times gradient over each group's rows, in their order, in float32 and rounded once."""
    (_, depth), columns, groups = x_RK.shape, grad_RN.shape[1], size_E.shape[0]
    tiles, tile = setting.tiles, setting.tiles.outer
    first_E = jnp.cumsum(size_E) - size_E
    operands = [first_E, size_E, x_RK, grad_RN]
    return launch(
        partial(_sum_outer, tiles),
        *operands,
        name="grouped_outer",
        grid=(-(-columns // tile.columns), -(-depth // tiles.outer_rows), groups),
        in_specs=[whole(operand.shape) for operand in operands],
        out_specs=whole((groups, depth, columns)),
        out_shape=jax.ShapeDtypeStruct((groups, depth, columns), dtype),
        how=Launch(tile.num_warps, tile.num_stages),
        implementation=setting.implementation,
    )


def _sum_outer(tiles: Tiles, first_ref, size_ref, x_ref, grad_ref, out_ref):
    """One group and one tile of its gradient."""
    tile, group = tiles.outer, program_id(2)
    unit = program_id(1) * tiles.outer_rows + jnp.arange(tiles.outer_rows, dtype=jnp.int32)
    column = program_id(0) * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
    fits_K, fits_N = unit < x_ref.shape[1], column < grad_ref.shape[1]
    first, size = first_ref[group], size_ref[group]
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def add(i, total):
        lane = i * tile.depth + jnp.arange(tile.depth, dtype=jnp.int32)
        row, own = first + lane, lane < size
        x = load(x_ref.at[row[None], unit[:, None]], mask=own[None] & fits_K[:, None], other=0.0)
        grad = load(grad_ref.at[row[:, None], column[None]], mask=own[:, None] & fits_N[None], other=0.0)
        return total + jnp.dot(x, grad, precision=precision, preferred_element_type=jnp.float32)

    steps = (size + (tile.depth - 1)) // tile.depth
    total = lax.fori_loop(0, steps, add, jnp.zeros((tiles.outer_rows, tile.columns), jnp.float32))
    store(
        out_ref.at[group, unit[:, None], column[None]], total.astype(out_ref.dtype), mask=fits_K[:, None] & fits_N[None]
    )
