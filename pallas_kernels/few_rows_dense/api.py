"""Few-row products: checks, choice of the implementation, and the call."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import blocks, product
from pallas_kernels.backend import Implementation
from pallas_kernels.few_rows_dense import kernel, reference
from pallas_kernels.few_rows_dense.kernel import Tiles
from pallas_kernels.quantized import Format, Quantized, Weight, form
from pallas_kernels.select import Choice, UnsupportedKernel, choose

OP = "few_rows_dense"
MOST_ROWS = 512
DEFAULT: Mapping[str, Tiles] = {"float32": Tiles(columns=32, depth=64, num_stages=2)}


def few_rows_dense(
    x_MD: jax.Array,
    w: Weight,
    bias_N: jax.Array | None = None,
    *,
    dtype: jnp.dtype,
    layer: jax.Array | None = None,
    implementation: Implementation | Choice = "xla",
    tiles: Tiles | None = None,
    summed: bool = True,
) -> jax.Array:
    """``x @ w + bias`` for up to 512 rows, the weight read once for up to 64 of them.

    A row's result is bitwise the same for any number of rows and any other rows: XLA and cuBLAS compute one row by
    other sums than several. Not differentiable but by ``xla``.

    Args:
      x_MD: rows.
      w: [D, N], or [L, D, N] if ``layer`` is given; plain, or quantized with scales over its last two axes.
      bias_N: added to the result.
      dtype: of both factors; sums are float32.
      layer: int32, which layer of the stack; the stack is never sliced, for a slice would be a copy.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.
      tiles: sizes; those that were measured, or else a safe default, if None.
      summed: whether the parts that the depth is cut into are added up, in their order, and the bias to them; otherwise
        whatever reads them does that, which is a kernel less.

    Returns:
      float32 [M, N], or [S, M, N] parts.

    Raises:
      UnsupportedKernel: shapes do not fit together.
    """
    axes = 2 if layer is None else 3
    if x_MD.ndim != 2 or len(w.shape) != axes or w.shape[-2] != x_MD.shape[1]:
        raise UnsupportedKernel(f"{OP}: rows [M, D] and a weight of {axes} axes needed, got {x_MD.shape} and {w.shape}")
    if bias_N is not None and bias_N.shape != w.shape[-1:]:
        raise UnsupportedKernel(f"{OP}: bias of {w.shape[-1:]} needed, got {bias_N.shape}")
    if not isinstance(implementation, Choice):
        reasons = obstacles(w, x_MD.shape[0], stacked=layer is not None)
        implementation = choose(OP, case_name(x_MD.shape[0], w), implementation, "", reasons)
    [part_SMN] = products_of_rows(x_MD, [w], dtype=dtype, layer=layer, implementation=implementation, tiles=tiles)
    if not summed:
        return part_SMN
    total = part_SMN[0]
    for part_MN in part_SMN[1:]:
        total = total + part_MN
    return total if bias_N is None else total + bias_N.astype(jnp.float32)


def products_of_rows(
    x_MD: jax.Array, weights: Sequence[Weight], *, dtype: jnp.dtype, layer: jax.Array | None, implementation: Choice,
    tiles: Tiles | None = None,
) -> list[jax.Array]:  # fmt: skip
    """Multiplies the same rows with several weights by one launch of the kernel.

    Args:
      x_MD: rows.
      weights: of one depth, see ``few_rows_dense``; nothing may stand in the kernel's way with any, see ``obstacles``.
      dtype: of both factors.
      layer: int32, which layer of the stacks.
      implementation: what computes all of them.
      tiles: sizes for all; those that were measured for each, or else a safe default, if None.

    Returns:
      float32 [S, M, N] for each weight, parts to be added up; each sum is in the order of a launch of its own.
    """
    dtype = jnp.dtype(dtype)
    if implementation.implementation == "xla":
        return [reference.few_rows_dense(x_MD, w, dtype=dtype, layer=layer)[None] for w in weights]
    return kernel.few_rows_dense(
        x_MD, weights, dtype=dtype, layer=layer, tiles=[tiles or tiles_for(w, dtype) for w in weights],
        implementation=implementation.implementation,
    )  # fmt: skip


def obstacles(w: Weight, rows: int, *, stacked: bool) -> list[str]:
    """Returns why the kernel cannot compute with this weight, each a sentence; empty if it can."""
    reasons = product.obstacles(w, "weight", lead=1 if stacked else 0)
    if isinstance(w, Quantized) and w.format.kind == "fp4":
        reasons.append("weight: two numbers per byte, which only experts have")
    if rows > MOST_ROWS:
        reasons.append(f"{rows} rows, more than {MOST_ROWS}: a library's product reads the weight less often")
    return reasons


def flat(w: Weight, lead: int, axes: int) -> Weight | None:
    """A weight whose contracted axes are one and whose other axes are one, without moving a number.

    Args:
      w: [*lead, *contracted, *others].
      lead: how many axes count layers.
      axes: how many are contracted.

    Returns:
      None where one scale belongs to numbers that would not be neighbors.
    """
    shape = w.shape[lead:]
    sizes = (*w.shape[:lead], math.prod(shape[:axes]), math.prod(shape[axes:]))
    if not isinstance(w, Quantized):
        return w.reshape(sizes)
    how = w.format
    if how.kind == "fp4" or len(how.blocks) != len(shape):
        return None
    deep, wide = _one_block(shape[:axes], how.blocks[:axes]), _one_block(shape[axes:], how.blocks[axes:])
    if deep is None or wide is None:
        return None
    scale = w.scale.shape[lead:]
    factors = w.scale.reshape(*w.shape[:lead], math.prod(scale[:axes]), math.prod(scale[axes:]))
    return Quantized(w.data.reshape(sizes), factors, Format(how.kind, (deep, wide), how.exponent_scales))


def _one_block(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int | None:
    """Neighbors that share a scale once axes are one, None if those that share are no neighbors."""
    block, whole = 1, True
    for axis in reversed(range(len(shape))):
        own = min(sizes[axis], shape[axis])
        ragged = shape[axis] % own and math.prod(shape[:axis]) > 1
        if own > 1 and (not whole or ragged):
            return None
        block, whole = block * own, whole and own == shape[axis]
    return block


def case_name(rows: int, w: Weight) -> str:
    """The shape in words, for the choice's record."""
    return f"M{rows} {shape_of(w)} {form(w)}"


def shape_of(w: Weight) -> str:
    """Sizes that tile sizes are measured for."""
    return f"D{w.shape[-2]} N{w.shape[-1]}"


def tiles_for(w: Weight, dtype: jnp.dtype) -> Tiles:
    """Measured tile sizes of this card and shape, or a safe default."""
    kind = form(w)
    default = DEFAULT.get(jnp.dtype(dtype).name, DEFAULT.get(kind, Tiles()))
    return blocks.look_up(OP, default, shape=shape_of(w), form=kind)
