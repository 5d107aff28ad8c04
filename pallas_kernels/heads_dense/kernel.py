"""The Pallas body of products per head: one head's tile of columns for blocks of rows, or its further channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, when, whole
from pallas_kernels.cache_entries import rotated
from pallas_kernels.quantized import Quantized, Weight, exponent

ROWS = 16
"""Rows of one tensor-core product. A row's sums must not depend on it, so it is the same for any number of rows."""
MOST_BLOCKS = 4
FEWEST = 32


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch; none depends on the number of rows.

    Attributes:
      columns: of a head's result per program, a power of two of at least 16.
      depth: numbers of the sum per step of the loop, a power of two of at least 16.
      num_warps: of 32 threads per program.
      num_stages: steps whose loads are under way at a time.
    """

    columns: int = 64
    depth: int = 128
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class _Body:
    """Static facts of the kernel: sums over ``depth`` numbers by ``step``, ``wide`` of ``columns`` per program."""

    cut: Any
    rows: int
    blocks: int
    depth: int
    columns: int
    step: int
    wide: int
    scales: tuple[int, ...]
    exponents: bool
    dtype: jnp.dtype
    stacked: bool


def heads_dense(
    x_SMHC: jax.Array, w: Weight, cut: Any, *, dtype: jnp.dtype, layer: jax.Array | None,
    where: Mapping[str, jax.Array], tiles: Tiles, implementation: Implementation,
) -> jax.Array:  # fmt: skip
    """As ``api.heads_dense``."""
    _, rows, heads, _ = x_SMHC.shape
    body = _body(rows, w, cut, tiles, dtype, stacked=layer is not None)
    operands = {"x": x_SMHC, "w": w.data if isinstance(w, Quantized) else w, **where}
    if isinstance(w, Quantized):
        operands["scale"] = w.scale
    if layer is not None:
        operands["layer"] = layer.astype(jnp.int32).reshape(1)
    out = jax.ShapeDtypeStruct((rows, heads, body.columns + cut.further), jnp.float32)
    return launch(
        partial(_program, body, tuple(operands)),
        *operands.values(),
        name="heads_dense",
        grid=(-(-rows // (ROWS * body.blocks)), heads, -(-body.columns // body.wide) + bool(cut.further)),
        in_specs=[whole(x.shape) for x in operands.values()],
        out_specs=whole(out.shape),
        out_shape=out,
        how=Launch(tiles.num_warps, tiles.num_stages),
        implementation=implementation,
    )


def _body(rows: int, w: Weight, cut: Any, tiles: Tiles, dtype: jnp.dtype, *, stacked: bool) -> _Body:
    rank = w.shape[-1]
    depth, columns = (rank, cut.count) if cut.from_rank else (cut.count, rank)
    blocks = next(n for n in (1, 2, MOST_BLOCKS) if ROWS * n >= min(rows, ROWS * MOST_BLOCKS))
    scales, exponents = (), False
    if isinstance(w, Quantized):
        scales, exponents = (1,) * (3 - len(w.format.blocks)) + w.format.blocks, w.format.exponent_scales
    step, wide = _step(depth, tiles.depth, scales[2 if cut.from_rank else 1] if scales else 0), _power(columns)
    return _Body(cut, rows, blocks, depth, columns, step, min(tiles.columns, wide), scales, exponents, dtype, stacked)


def _step(depth: int, most: int, block: int) -> int:
    """Numbers per step, a power of two that divides depth and scale block where that leaves not too few."""
    divisors = (whole & -whole for whole in (depth, block))
    return min(most, _power(depth), *(divisor for divisor in divisors if divisor >= FEWEST))


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _program(body: _Body, names: tuple[str, ...], *refs: Any) -> None:
    ref, out_ref, h, tile = dict(zip(names, refs, strict=False)), refs[-1], program_id(1), program_id(2)
    first_row = program_id(0) * (ROWS * body.blocks)
    rows = [first_row + b * ROWS + jnp.arange(ROWS, dtype=jnp.int32) for b in range(body.blocks)]
    if not body.cut.further:
        _product(body, ref, out_ref, rows, h, tile * body.wide)
        return
    last = -(-body.columns // body.wide)
    when(tile < last)(partial(_product, body, ref, out_ref, rows, h, tile * body.wide))
    when(tile == last)(partial(_pass_on, body, ref, out_ref, rows, h))


def _product(
    body: _Body, ref: dict[str, Any], out_ref: Any, rows: list[jax.Array], h: jax.Array, first_column: jax.Array
) -> None:
    """Adds up one tile of columns, step by step along the depth."""
    column = first_column + jnp.arange(body.wide, dtype=jnp.int32)

    def add(number: Any, sums: list[jax.Array]) -> list[jax.Array]:
        first = number * body.step
        deep = first + jnp.arange(body.step, dtype=jnp.int32)
        w = _weights(body, ref, h, (first, deep), (first_column, column))
        xs = (_read(body, ref, h, row, deep, body.depth).astype(body.dtype) for row in rows)
        return [total + _dot(x, w) for total, x in zip(sums, xs, strict=True)]

    zeros = [jnp.zeros((ROWS, body.wide), jnp.float32) for _ in rows]
    sums = lax.fori_loop(0, -(-body.depth // body.step), add, zeros)
    for row, total in zip(rows, sums, strict=True):
        mask = (row < body.rows)[:, None] & (column < body.columns)[None]
        store(out_ref.at[row[:, None], h, column[None]], total, mask=mask)


def _pass_on(body: _Body, ref: dict[str, Any], out_ref: Any, rows: list[jax.Array], h: jax.Array) -> None:
    """Leaves a head's further channels after its columns, rotated where there are angles."""
    cut = body.cut
    place = jnp.arange(1 << (cut.further - 1).bit_length(), dtype=jnp.int32)
    for row in rows:

        def read(place_C: jax.Array, row: jax.Array = row) -> jax.Array:
            return _read(body, ref, h, row, cut.count + place_C, cut.count + cut.further)

        x = read(place)
        if "cos" in ref:
            x = rotated(x, read, ref, row[:, None], place, cut.further, interleaved=cut.interleaved)
        mask = (row < body.rows)[:, None] & (place < cut.further)[None]
        store(out_ref.at[row[:, None], h, body.columns + place[None]], x, mask=mask)


def _read(body: _Body, ref: dict[str, Any], h: Any, row: jax.Array, channel: jax.Array, end: int) -> jax.Array:
    """Sums of the parts of rows in their order, times the row's factor; zero after the last row and channel."""
    mask, index = (row < body.rows)[:, None] & (channel < end)[None], (row[:, None], h, channel[None])
    x = load(ref["x"].at[(0, *index)], mask=mask, other=0.0).astype(jnp.float32)
    for part in range(1, ref["x"].shape[0]):
        x = x + load(ref["x"].at[(part, *index)], mask=mask, other=0.0)
    if "factor" not in ref:
        return x
    return x * load(ref["factor"].at[row], mask=row < body.rows, other=0.0)[:, None]


def _weights(
    body: _Body, ref: dict[str, Any], h: Any, depth: tuple[Any, jax.Array], column: tuple[Any, jax.Array]
) -> jax.Array:
    """A tile [depth, columns] of a head's weights, whichever of its two axes is summed over, in the products' dtype.

    Quantized numbers are multiplied by their scale and rounded once, as ``Quantized.widen`` does.
    """
    (first, deep), (first_column, columns) = depth, column
    mask = None
    if body.depth % body.step or body.columns % body.wide:
        mask = (deep < body.depth)[:, None] & (columns < body.columns)[None]
    axes = {"depth": (first, deep[:, None], body.step), "column": (first_column, columns[None], body.wide)}
    channel, rank = (axes["column"], axes["depth"]) if body.cut.from_rank else (axes["depth"], axes["column"])
    channel = (body.cut.first + channel[0], body.cut.first + channel[1], channel[2])
    lead = (ref["layer"][0],) if body.stacked else ()
    at = ref["w"].at[(*lead, h, channel[1], rank[1])]
    w = load(at) if mask is None else load(at, mask=mask, other=np.zeros((), ref["w"].dtype))
    if "scale" not in ref:
        return w.astype(body.dtype)
    if w.dtype == jnp.float8_e4m3fn:
        w = w.astype(jnp.float16)  # the card has no fast way from e4m3 to wider numbers but this
    of_heads, *of_axes = body.scales
    index = [
        _block(axis, size, start, ref["scale"].shape[-2 + i])
        for i, (axis, size, start) in enumerate(zip((channel, rank), of_axes, (body.cut.first, 0), strict=True))
    ]
    at = ref["scale"].at[(*lead, h // of_heads, *index)]
    factor = ref["scale"][(*lead, h // of_heads, *index)] if not any(map(jnp.ndim, index)) else load(at)
    factor = exponent(factor) if body.exponents else factor
    return (w.astype(jnp.float32) * factor).astype(body.dtype)


def _block(axis: tuple[Any, jax.Array, int], size: int, start: int, count: int) -> Any:
    """Returns which scale an axis of a tile takes: one for all if none begins within, else one for each number."""
    first, every, width = axis
    if size % width == 0 and start % width == 0:
        return first // size
    return jnp.minimum(every // size, count - 1)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32)
