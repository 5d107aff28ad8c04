"""Products per head: checks, choice of the implementation, and the call."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import blocks
from pallas_kernels.backend import Implementation
from pallas_kernels.heads_dense import kernel, reference
from pallas_kernels.heads_dense.kernel import Tiles
from pallas_kernels.quantized import Quantized, Weight, form
from pallas_kernels.select import Choice, UnsupportedKernel, choose

OP = "heads_dense"
MOST_ROWS = 512
KNOWN = ("bfloat16", "float16", "float32", "float8_e4m3fn")
WHERE = ("cos", "sin", "factor")


@dataclass(frozen=True)
class Cut:
    """Which of the channels in front of each head's latents are multiplied, and in which direction.

    Attributes:
      first, count: of the channels X of each head's weight [X, R].
      from_rank: whether rows have R numbers per head and the result ``count``, or the other way round.
      further: channels of a head that follow the product's in rows and, as they are or rotated, in the result; none
        with ``from_rank``.
      interleaved: pairs of the rotation are (2i, 2i + 1) instead of (i, i + further / 2).
    """

    first: int
    count: int
    from_rank: bool = False
    further: int = 0
    interleaved: bool = False


def heads_dense(
    part_SMN: jax.Array,
    w: Weight,
    cut: Cut,
    *,
    dtype: jnp.dtype,
    layer: jax.Array | None = None,
    where: Mapping[str, jax.Array] | None = None,
    implementation: Implementation | Choice = "xla",
    tiles: Tiles | None = None,
) -> jax.Array:
    """Multiplies each head's channels with the head's own weights (DeepSeek-V2, appendix C).

    A row's result is bitwise the same for any number of rows and any other rows.

    Args:
      part_SMN: parts of rows, which are added up in their order; columns are [H, C].
      w: [H, X, R], or [L, H, X, R] if ``layer`` is given; plain, or quantized with scales over its last three axes.
      cut: what is multiplied with what.
      dtype: of both factors; sums are float32.
      layer: int32, which layer of the stack; the stack is never sliced, for a slice would be a copy.
      where: float32 ``cos`` and ``sin`` [M, further / 2], without which further channels are not rotated; ``factor``
        [M], multiplies rows first.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.
      tiles: sizes; those that were measured, or else a safe default, if None.

    Returns:
      float32 [M, H, R + further], or [M, H, count] with ``from_rank``.

    Raises:
      UnsupportedKernel: shapes do not fit together.
    """
    where, dtype = where or {}, jnp.dtype(dtype)
    _check(part_SMN, w, cut, where, stacked=layer is not None)
    rows = part_SMN.shape[1]
    x_SMHC = part_SMN.reshape(*part_SMN.shape[:2], w.shape[-3], -1)
    if not isinstance(implementation, Choice):
        implementation = choose(OP, case_name(rows, w, cut), implementation, "", obstacles(w, rows))
    if implementation.implementation == "xla":
        return reference.heads_dense(x_SMHC, w, cut, dtype=dtype, layer=layer, where=where)
    return kernel.heads_dense(
        x_SMHC, w, cut, dtype=dtype, layer=layer, where=where, tiles=tiles or tiles_for(w, cut, dtype),
        implementation=implementation.implementation,
    )  # fmt: skip


def obstacles(w: Weight, rows: int) -> list[str]:
    """Returns why the kernel cannot compute with this weight, each a sentence; empty if it can."""
    reasons = []
    if isinstance(w, Quantized) and w.format.kind == "fp4":
        reasons.append("weight: two numbers per byte, which only experts have")
    elif not isinstance(w, Quantized) and jnp.dtype(w.dtype).name not in KNOWN:
        reasons.append(f"weight: dtype {w.dtype} has no product in the kernel")
    if rows > MOST_ROWS:
        reasons.append(f"{rows} rows, more than {MOST_ROWS}: a library's product reads the weight less often")
    return reasons


def case_name(rows: int, w: Weight, cut: Cut) -> str:
    """The shape in words, for the choice's record."""
    return f"M{rows} {shape_of(w, cut)} {form(w)}"


def shape_of(w: Weight, cut: Cut) -> str:
    """Sizes that tile sizes are measured for."""
    heads, _, rank = w.shape[-3:]
    return f"H{heads} R{rank} X{cut.count}" if cut.from_rank else f"H{heads} X{cut.count} R{rank}"


def tiles_for(w: Weight, cut: Cut, dtype: jnp.dtype) -> Tiles:
    """Measured tile sizes of this card and shape, or a safe default."""
    default = Tiles(columns=32, depth=64, num_stages=2) if dtype == jnp.float32 else Tiles()
    return blocks.look_up(OP, default, shape=shape_of(w, cut), form=form(w))


def _check(part_SMN, w: Weight, cut: Cut, where: Mapping[str, jax.Array], *, stacked: bool) -> None:
    if len(w.shape) != 3 + stacked:
        raise UnsupportedKernel(f"{OP}: a weight of {3 + stacked} axes needed, got {w.shape}")
    heads, channels, rank = w.shape[-3:]
    columns = heads * (rank if cut.from_rank else cut.count + cut.further)
    if part_SMN.ndim != 3 or part_SMN.shape[2] != columns:
        raise UnsupportedKernel(f"{OP}: parts [S, M, {columns}] are needed, got {part_SMN.shape}")
    if cut.first + cut.count > channels or (cut.from_rank and cut.further):
        raise UnsupportedKernel(f"{OP}: {channels} channels per head do not hold {cut}")
    if set(where) - set(WHERE) or ("cos" in where) != ("sin" in where) or (cut.from_rank and where):
        raise UnsupportedKernel(f"{OP}: {', '.join(WHERE)} are known, cos with sin, got {', '.join(where)}")
