"""The Pallas body: one program adds up and normalizes one row."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, whole
from pallas_kernels.steady import total

PER_WARP = 512


@dataclass(frozen=True)
class _Body:
    """Static facts of the kernel; the numbers of a row are filled up to a power of two."""

    width: int
    wide: int
    norm: Any
    stacked: bool
    how: Implementation


def add_norm(
    x_MD: jax.Array, scale: jax.Array, norm: Any, parts: Any, *, layer: jax.Array | None,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """As ``api.add_norm``."""
    rows, width = x_MD.shape
    operands = {"x": x_MD, "scale": scale}
    if parts is not None:
        operands |= {"part": parts.part_SMD} | ({} if parts.bias is None else {"bias": parts.bias})
    if layer is not None:
        operands["layer"] = layer.astype(jnp.int32).reshape(1)
    shapes = {"normed": jax.ShapeDtypeStruct(x_MD.shape, jnp.float32)}
    if parts is not None:
        shapes["sum"] = shapes["normed"]
    if norm.dtype:
        shapes["copy"] = jax.ShapeDtypeStruct((norm.planes, rows, width // norm.planes), jnp.dtype(norm.dtype))
    wide = 1 << (width - 1).bit_length()
    outs = launch(
        partial(_row, _Body(width, wide, norm, layer is not None, implementation), (*operands, *shapes)),
        *operands.values(),
        name="add_norm",
        grid=(rows,),
        in_specs=[whole(x.shape) for x in operands.values()],
        out_specs=[whole(s.shape) for s in shapes.values()],
        out_shape=list(shapes.values()),
        how=Launch(num_warps=max(1, min(8, wide // PER_WARP)), num_stages=1),
        implementation=implementation,
    )
    made: dict[str, jax.Array] = dict(zip(shapes, outs, strict=True))
    return made.get("sum", x_MD), made["normed"], made.get("copy")


def _row(body: _Body, names: tuple[str, ...], *refs: Any) -> None:
    ref, norm, m = dict(zip(names, refs, strict=True)), body.norm, program_id(0)
    column_X = jnp.arange(body.wide, dtype=jnp.int32)
    inside_X = column_X < body.width
    lead = (ref["layer"][0],) if body.stacked else ()
    x_X = load(ref["x"].at[m, column_X], mask=inside_X, other=0.0)
    if "part" in ref:
        added_X = load(ref["part"].at[0, m, column_X], mask=inside_X, other=0.0)
        for s in range(1, ref["part"].shape[0]):
            added_X = added_X + load(ref["part"].at[s, m, column_X], mask=inside_X, other=0.0)
        if "bias" in ref:
            added_X = added_X + load(ref["bias"].at[(*lead, column_X)], mask=inside_X, other=0.0).astype(jnp.float32)
        x_X = x_X + added_X
        store(ref["sum"].at[m, column_X], x_X, mask=inside_X)
    scale_X = load(ref["scale"].at[(*lead, column_X)], mask=inside_X, other=0.0).astype(jnp.float32)
    inverse = lax.rsqrt(total(x_X * x_X, 0, body.how) / np.float32(body.width) + np.float32(norm.eps))
    normed_X = x_X * inverse * (scale_X + np.float32(norm.offset))
    store(ref["normed"].at[m, column_X], normed_X, mask=inside_X)
    if "copy" in ref:
        place = ref["copy"].at[column_X % norm.planes, m, column_X // norm.planes]
        store(place, normed_X.astype(norm.dtype), mask=inside_X)
