"""Inside a kernel: a tile of rows times columns of one group's weights, whatever the weights are stored as."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import assembly, load
from pallas_kernels.quantized import Format, Quantized, Weight

LANES = 4
FP4_STEP = np.float32(2.0**14)  # of e2m1's bits read as those of a float16


@dataclass(frozen=True)
class Product:
    """Tile sizes of one product.

    Attributes:
      columns: of the result per program, a power of two of at least 16, or of at least 64 for fp4.
      depth: numbers of a weight's column that one step of the loop reads at most.
      num_warps: of 32 threads per program.
      num_stages: steps whose loads are under way at a time.
    """

    columns: int = 64
    depth: int = 128
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True)
class Layout:
    """Static facts of a weight [..., K, N] or [..., K, J, N] that products are computed with.

    Attributes:
      depth, columns: K and N.
      format: None for a plain array.
      blocks: numbers per scale along K, J and N; K itself where one scale covers a column.
      transposed: whether the array is [..., N, K]; only for plain ones.
      on_gpu: whether instructions of NVIDIA's GPUs may decode fp4, which are twice as few.
    """

    depth: int
    columns: int
    format: Format | None = None
    blocks: tuple[int, int, int] = (0, 0, 0)
    transposed: bool = False
    on_gpu: bool = False

    @property
    def planes(self) -> int:
        """In how many parts x must come: even and odd columns apart for two numbers per byte."""
        return 2 if self.format is not None and self.format.kind == "fp4" else 1

    @property
    def lanes(self) -> int:
        """Columns per stored word: four bytes of fp4 are taken at a time, whose codes are unpacked in pairs."""
        return LANES if self.planes == 2 else 1

    def column(self, first: Any, lane: int, columns: int) -> jax.Array:
        """Columns of one lane in a tile of so many that begins at ``first``."""
        return first + jnp.arange(columns // self.lanes, dtype=jnp.int32) * self.lanes + lane

    @property
    def scaled_inside(self) -> bool:
        """Whether scales change along K, so that partial sums are scaled and not the whole."""
        return self.format is not None and self.blocks[0] < self.depth

    def step(self, wanted: int) -> int:
        """Numbers along K of one tensor-core product: at most ``wanted``, and of one scale."""
        return min(wanted, self.blocks[0]) if self.scaled_inside else min(wanted, _power(self.depth))

    def unroll(self, wanted: int) -> int:
        """Products per step of the loop: as many as ``wanted`` numbers hold, and a divisor of all there are."""
        step = self.step(wanted)
        steps = -(-self.depth // step)
        return next(n for n in range(max(1, wanted // step), 0, -1) if steps % n == 0)


def layout(w: Weight, *, lead: int, on_gpu: bool = False) -> Layout:
    """Facts of a weight whose first ``lead`` axes count layers and groups."""
    inner = w.shape[lead:]
    if not isinstance(w, Quantized):
        return Layout(inner[0], inner[-1])
    blocks = (1,) * (w.scale.ndim - len(w.format.blocks)) + w.format.blocks
    deep, *part, wide = blocks[lead:]
    return Layout(inner[0], inner[-1], w.format, (min(deep, inner[0]), (part or [1])[0], wide), on_gpu=on_gpu)


def obstacles(w: Weight, name: str, *, lead: int) -> list[str]:
    """Returns why products with a weight cannot be computed by the kernel; empty if they can."""
    if not isinstance(w, Quantized):
        known = w.dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn)
        return [] if known else [f"{name}: dtype {w.dtype} has no product in the kernel"]
    facts, form, axes = layout(w, lead=lead), w.format, len(w.shape) - lead
    reasons = []
    least = 32 if form.kind == "fp4" else 16
    if facts.scaled_inside and (facts.blocks[0] < least or facts.blocks[0] & (facts.blocks[0] - 1)):
        reasons.append(
            f"{name}: {facts.blocks[0]} numbers per scale along the product's sum, not a power of two >= {least}"
        )
    if form.kind == "fp4" and form.packed_axis != -axes:
        reasons.append(f"{name}: packed along axis {form.packed_axis}, not along that of the product's sum, {-axes}")
    if form.kind == "fp4" and facts.columns % LANES:
        reasons.append(f"{name}: {facts.columns} columns, not a multiple of {LANES}")
    if any(block != 1 for block in form.blocks[: len(form.blocks) - axes]):
        reasons.append(f"{name}: scales shared by groups")
    return reasons


def references(w: Weight) -> list[jax.Array]:
    """Returns what a kernel reads of a weight: numbers, and scales if it has them; bytes of fp4 in words of four.

    The words are a view, not a copy.
    """
    if not isinstance(w, Quantized):
        return [w]
    if w.format.kind != "fp4":
        return [w.data, w.scale]
    return [_words(w.data), _words(w.scale) if _in_words(w.format) else w.scale]


def _in_words(form: Format) -> bool:
    return form.kind == "fp4" and form.exponent_scales and form.blocks[-1] == 1


def _words(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // LANES, LANES), jnp.uint32)


def planes(x_RK: jax.Array, count: int) -> jax.Array:
    """[count, R, K / count]: for two planes even columns, then odd ones."""
    rows, depth = x_RK.shape
    return x_RK[None] if count == 1 else jnp.moveaxis(x_RK.reshape(rows, depth // 2, 2), 2, 0)


def tile_of(ref, row: jax.Array, own: jax.Array, facts: Layout) -> Callable[[int, Any, int], jax.Array]:
    """Reads some columns of the given rows of [planes, rows, depth], zeros where there are none."""
    width = facts.depth // facts.planes

    def tile(plane: int, first, size: int) -> jax.Array:
        unit = first + jnp.arange(size, dtype=jnp.int32)
        mask = own[:, None] if width % size == 0 else own[:, None] & (unit < width)[None]
        return load(ref.at[plane, row[:, None], unit[None]], mask=mask, other=0.0)

    return tile


def products(
    x_tile: Callable[[int, Any, int], jax.Array],
    refs: Sequence[Any],
    facts: Layout,
    lead: tuple[Any, ...],
    parts: Sequence[tuple[int, ...]],
    program: Any,
    tile: Product,
    rows: int,
) -> list[list[jax.Array]]:
    """Float32 [rows, tile.columns / lanes] products of the same rows with the same columns of each part.

    Sums run along K in steps of a size that depends on nothing but the weight, so that a row comes out the same
    whatever is computed beside it. A scale multiplies the float32 sum of the numbers that share it.

    Args:
      x_tile: takes a plane, the first column of it and how many; returns the rows there, zero after the last column.
      refs: as from ``references``.
      facts: of the weight.
      lead: layer and group.
      parts: index between K and N for each result: ``()``, or ``(0,)`` and ``(1,)``.
      program: which tile of columns.
      tile: sizes.
      rows: of x.

    Returns:
      For each part and lane the sums of the columns that ``Layout.column`` names.
    """
    step, unroll = facts.step(tile.depth), facts.unroll(tile.depth)
    steps, stored = -(-facts.depth // step), step // facts.planes
    word = program * (tile.columns // facts.lanes) + jnp.arange(tile.columns // facts.lanes, dtype=jnp.int32)
    fits = None if facts.columns % tile.columns == 0 else word < facts.columns // facts.lanes

    def scales(number) -> list[list[jax.Array]]:
        row = number * step // facts.blocks[0] if facts.scaled_inside else 0
        return [_scales(refs[1], facts, (*lead, row), part, program * tile.columns, word, fits, tile) for part in parts]

    def factors(scales: list[list[jax.Array]]) -> list[list[jax.Array]]:
        return [_factors(part, facts) for part in scales]

    def add(number, sums, by):
        row = number * stored + jnp.arange(stored, dtype=jnp.int32)
        inside = _inside(facts, row, step, fits)
        xs = [x_tile(plane, number * stored, stored) for plane in range(facts.planes)]
        new = []
        for place, part in enumerate(parts):
            index = (word[None], row[:, None]) if facts.transposed else (row[:, None], *part, word[None])
            ref = refs[0].at[(*lead, *index)]
            w = load(ref) if inside is None else load(ref, mask=inside, other=_zero(refs[0].dtype))
            lanes = []
            for lane, halves in enumerate(_decoded(w, facts, xs[0].dtype)):
                part = functools.reduce(operator.add, (_dot(x, half) for x, half in zip(xs, halves, strict=True)))
                lanes.append(sums[place][lane] + (part * by[place][lane] if by else part))
            new.append(lanes)
        return new

    def several(i, carry):
        # Scales are asked for a whole turn ahead, as they are stored: nothing else would hide the wait for them.
        sums, asked = carry
        numbers = [i * unroll + u for u in range(unroll)]
        later = [scales(jnp.minimum(number + unroll, steps - 1)) for number in numbers] if asked else []
        for u, number in enumerate(numbers):
            sums = add(number, sums, factors(asked[u]) if asked else [])
        return sums, later

    zeros = [[jnp.zeros((rows, tile.columns // facts.lanes), jnp.float32)] * facts.lanes for _ in parts]
    first = [scales(u) for u in range(unroll)] if facts.scaled_inside else []
    sums, _ = lax.fori_loop(0, steps // unroll, several, (zeros, first))
    if facts.format is None:
        return sums
    if facts.scaled_inside:
        return sums
    return [[total * f for total, f in zip(*pair, strict=True)] for pair in zip(sums, factors(scales(0)), strict=True)]


def _scales(ref, facts: Layout, lead, part, first_column, word, fits, tile: Product) -> list[jax.Array]:
    """Scales of one product as they are stored: one for all columns, words of four lanes, or those of each lane."""
    _, between, wide = facts.blocks
    assert facts.format is not None
    index = (*lead, *(j // between for j in part))
    if wide % tile.columns == 0:
        return [ref[(*index, first_column // wide)]]
    if _in_words(facts.format):
        return [_masked(ref.at[(*index, word)], fits)]
    columns = [word * facts.lanes + lane for lane in range(facts.lanes)]
    return [_masked(ref.at[(*index, column // wide)], fits) for column in columns]


def _factors(scales: list[jax.Array], facts: Layout) -> list[jax.Array]:
    """Factors of one product by lane: scalars, or [1, words]."""
    assert facts.format is not None
    if scales[0].ndim == 0:
        scales = scales * facts.lanes
    elif _in_words(facts.format):
        scales = [((scales[0] >> np.uint32(8 * lane)) & np.uint32(255))[None] for lane in range(facts.lanes)]
    else:
        scales = [scale[None] for scale in scales]
    return [_power_of_two(f) if facts.format.exponent_scales else f for f in scales]


def _power_of_two(byte: jax.Array) -> jax.Array:
    """2 ** (byte - 127) by its bits, but 0 for the lowest, which is 2 ** -127; on that a test would cost more."""
    return lax.bitcast_convert_type(byte.astype(jnp.uint32) << np.uint32(23), jnp.float32)


def _inside(facts: Layout, row: jax.Array, step: int, fits: jax.Array | None) -> jax.Array | None:
    if facts.depth % step == 0:
        return None if fits is None else fits[None]
    deep = row < facts.depth // facts.planes
    return deep[:, None] if fits is None else deep[:, None] & fits[None]


def _masked(ref, mask: jax.Array | None) -> jax.Array:
    return load(ref) if mask is None else load(ref, mask=mask, other=_zero(ref.dtype))


def _decoded(w: jax.Array, facts: Layout, dtype: jnp.dtype) -> list[list[jax.Array]]:
    """The numbers by lane and plane in the dtype of the product."""
    if w.dtype == jnp.float8_e4m3fn:
        w = w.astype(jnp.float16).astype(jnp.float32)  # the card has no fast way from e4m3 to bfloat16 but this
    if facts.planes == 1:
        return [[w.astype(dtype)]]
    if facts.on_gpu and dtype == jnp.bfloat16:
        return _assembled(w)
    lanes: list[list[jax.Array]] = [[] for _ in range(LANES)]
    for lane, half in ((lane, half) for lane in (0, 1) for half in (0, 1)):
        first = 8 * lane + 4 * half
        pair = (_shifted(w, 9 - first) & np.uint32(0x0E000E00)) | (_shifted(w, 12 - first) & np.uint32(0x80008000))
        lanes[lane].append(_halfs(pair & np.uint32(0xFFFF), dtype))
        lanes[lane + 2].append(_halfs(pair >> np.uint32(16), dtype))
    return lanes


def _assembled(w: jax.Array) -> list[list[jax.Array]]:
    """The same of two words at a time: e2m1's bits in the places of bfloat16's are its values times 2 ** -126."""
    kind = jax.ShapeDtypeStruct(w.shape, jnp.bfloat16)

    def part(lane: int, half: int) -> jax.Array:
        lines = [
            ".reg .b32 byte, sign, rest, up, none;",
            "mov.b32 up, 0x7E807E80;",
            "mov.b32 none, 0x80008000;",
            # The lane's byte of both words, in the upper half of each 16 bits.
            f"prmt.b32 byte, $1, $2, {(4 + lane) << 12 | lane << 8 | lane << 4 | lane:#x};",
            "mov.b32 sign, byte;" if half else "shl.b32 sign, byte, 4;",
            f"shr.b32 rest, byte, {6 if half else 2};",
            "and.b32 rest, rest, 0x01C001C0;",
            "lop3.b32 rest, sign, 0x80008000, rest, 0xEA;",  # (sign & mask) | rest
            "fma.rn.bf16x2 $0, rest, up, none;",
        ]
        text = "{" + " ".join(lines) + "}"
        (out,) = assembly(text, args=[w], constraints="=r,r,r", pack=2, result_shape_dtypes=[kind])
        return out

    return [[part(lane, 0), part(lane, 1)] for lane in range(LANES)]


def _shifted(w: jax.Array, left: int) -> jax.Array:
    return w << np.uint32(left) if left > 0 else w >> np.uint32(-left)


def _halfs(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return (lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32) * FP4_STEP).astype(dtype)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32)


def _zero(dtype: jnp.dtype):
    return np.zeros((), dtype)


def _power(n: int) -> int:
    return 1 << max(4, math.ceil(math.log2(n)))
