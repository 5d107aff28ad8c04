"""The Pallas body of few-row products: tiles of columns, each a sum over one part of the depth, for blocks of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, when, whole
from pallas_kernels.product import Layout, layout, references
from pallas_kernels.quantized import Weight, exponent

ROWS = 16
"""Rows of one tensor-core product. A row's sums must not depend on it, so it is the same for any number of rows."""
MOST_BLOCKS = 4
FEWEST_STEPS = 4


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch; none depends on the number of rows.

    Attributes:
      columns: of the result per program, a power of two of at least 16.
      depth: numbers of a weight's column per step of the loop, a power of two of at least 16.
      programs: that keep a GPU busy; a weight of fewer tiles is cut along its depth, too.
      num_warps: of 32 threads per program.
      num_stages: steps whose loads are under way at a time.
    """

    columns: int = 64
    depth: int = 128
    programs: int = 264
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True)
class _Body:
    """Static facts of the kernel: ``parts`` of ``steps`` steps each add up the depth, for ``blocks`` of rows."""

    facts: Layout
    rows: int
    blocks: int
    columns: int
    step: int
    parts: int
    steps: int
    dtype: jnp.dtype
    stacked: bool
    first_tile: int

    @property
    def tiles(self) -> int:
        """Programs side by side along the columns; the first one of them all has the number ``first_tile``."""
        return -(-self.facts.columns // self.columns)


def few_rows_dense(
    x_MD: jax.Array,
    weights: Sequence[Weight],
    *,
    dtype: jnp.dtype,
    layer: jax.Array | None,
    tiles: Sequence[Tiles],
    implementation: Implementation,
) -> list[jax.Array]:
    """Returns the parts [S, M, N] of each weight's product, all by one launch.

    Args:
      x_MD: rows.
      weights: see ``api.few_rows_dense``.
      dtype: of both factors.
      layer: int32, which layer of the stacks.
      tiles: sizes for each weight; warps and stages are the first one's.
      implementation: what computes it.
    """
    rows, lead = x_MD.shape[0], 0 if layer is None else 1
    bodies, first_tile = [], 0
    for w, own in zip(weights, tiles, strict=True):
        bodies.append(_body(layout(w, lead=lead), rows, own, dtype, first_tile, stacked=layer is not None))
        first_tile += bodies[-1].tiles
    place = jnp.zeros(1, jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)
    read = [references(w) for w in weights]
    operands = [place, x_MD, *(operand for each in read for operand in each)]
    outs = [jax.ShapeDtypeStruct((body.parts, rows, body.facts.columns), jnp.float32) for body in bodies]
    return launch(
        partial(_one_of, tuple(bodies), tuple(map(len, read))),
        *operands,
        name="few_rows_dense",
        grid=(-(-rows // (ROWS * bodies[0].blocks)), first_tile, max(body.parts for body in bodies)),
        in_specs=[whole(operand.shape) for operand in operands],
        out_specs=[whole(out.shape) for out in outs],
        out_shape=outs,
        how=Launch(tiles[0].num_warps, tiles[0].num_stages),
        implementation=implementation,
    )


def _body(facts: Layout, rows: int, tiles: Tiles, dtype: jnp.dtype, first_tile: int, *, stacked: bool) -> _Body:
    columns = min(tiles.columns, max(16, 1 << (facts.columns - 1).bit_length()))
    step = facts.step(tiles.depth)
    steps = -(-facts.depth // step)
    parts = min(tiles.programs // -(-facts.columns // columns), steps // FEWEST_STEPS)
    each = -(-steps // max(parts, 1))
    blocks = next(n for n in (1, 2, MOST_BLOCKS) if ROWS * n >= min(rows, ROWS * MOST_BLOCKS))
    return _Body(facts, rows, blocks, columns, step, -(-steps // each), each, dtype, stacked, first_tile)


def _one_of(bodies: tuple[_Body, ...], counts: tuple[int, ...], layer_ref, x_ref, *refs: Any):
    """A program of one of the weights, each of which is read by so many references."""
    outs, first, place = refs[sum(counts) :], 0, (program_id(0), program_id(1), program_id(2))
    for body, count, out_ref in zip(bodies, counts, outs, strict=True):
        run = partial(_product, body, place, layer_ref, x_ref, *refs[first : first + count], out_ref)
        first += count
        if len(bodies) == 1:
            run()
            return
        tile = place[1] - body.first_tile
        when((tile >= 0) & (tile < body.tiles) & (place[2] < body.parts))(run)


def _product(body: _Body, place: tuple[jax.Array, jax.Array, jax.Array], layer_ref, x_ref, *refs: Any):
    """One tile of columns, over one part of the depth, for a few blocks of rows."""
    *weight_refs, out_ref = refs
    facts, (block, tile, part) = body.facts, place
    first_column = (tile - body.first_tile) * body.columns
    column = first_column + jnp.arange(body.columns, dtype=jnp.int32)
    first_row = block * (ROWS * body.blocks)
    rows = [first_row + b * ROWS + jnp.arange(ROWS, dtype=jnp.int32) for b in range(body.blocks)]
    lead = (layer_ref[0],) if body.stacked else ()
    factor_at = partial(_factor, weight_refs, facts, lead, first_column, body.columns)
    first, last = part * body.steps, jnp.minimum((part + 1) * body.steps, -(-facts.depth // body.step))

    def add(number, carry):
        sums, factor = carry
        deep = number * body.step + jnp.arange(body.step, dtype=jnp.int32)
        w = _weights(weight_refs[0], lead, deep, column, facts, body.step).astype(body.dtype)
        # The next scale is asked for before this product: nothing else would hide the wait for it.
        later = factor_at(jnp.minimum(number + 1, last - 1) * body.step, inside=True)
        new = []
        for row, total in zip(rows, sums, strict=True):
            part = _dot(_rows(x_ref, row, deep, body), w)
            new.append(total + (part if factor is None else part * factor))
        return new, later

    zeros = [jnp.zeros((ROWS, body.columns), jnp.float32) for _ in rows]
    factor = factor_at(first * body.step, inside=True)
    sums, _ = lax.fori_loop(first, last, add, (zeros, factor))
    factor = factor_at(0, inside=False)
    for row, total in zip(rows, sums, strict=True):
        result = total if factor is None else total * factor
        mask = _known(row, body) & (column < facts.columns)[None]
        store(out_ref.at[part, row[:, None], column[None]], result, mask=mask)


def _known(row: jax.Array, body: _Body) -> jax.Array:
    return (row < body.rows)[:, None]


def _rows(x_ref, row, deep, body: _Body) -> jax.Array:
    mask = _known(row, body)
    if body.facts.depth % body.step:
        mask = mask & (deep < body.facts.depth)[None]
    return load(x_ref.at[row[:, None], deep[None]], mask=mask, other=0.0).astype(body.dtype)


def _weights(ref, lead: tuple[Any, ...], deep, column, facts: Layout, step: int) -> jax.Array:
    place, mask = ref.at[(*lead, deep[:, None], column[None])], None
    if facts.depth % step:
        mask = (deep < facts.depth)[:, None]
    if facts.columns % column.shape[0]:
        fits = (column < facts.columns)[None]
        mask = fits if mask is None else mask & fits
    return load(place) if mask is None else load(place, mask=mask, other=np.zeros((), ref.dtype))


def _factor(
    refs: Sequence[Any], facts: Layout, lead: tuple[Any, ...], first_column, columns: int, deep, *, inside: bool
) -> Any:
    """Scales of one step, or with ``inside`` false those of whole columns; None where there are none of that kind."""
    if facts.format is None or facts.scaled_inside != inside:
        return None
    row = deep // facts.blocks[0] if inside else 0
    wide = facts.blocks[2]
    if wide % columns == 0:
        scale = refs[1][(*lead, row, first_column // wide)]
    else:
        column = first_column + jnp.arange(columns, dtype=jnp.int32)
        place = refs[1].at[(*lead, row, column // wide)]
        scale = load(place, mask=column < facts.columns, other=np.zeros((), refs[1].dtype))[None]
    return exponent(scale) if facts.format.exponent_scales else scale


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32)
