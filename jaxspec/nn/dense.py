"""Matrix products of a few rows with big weights, in the forms that every backend computes fast and row-invariantly."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array

FEW_COLUMNS = 4


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(x_MD: Array, w_DX: Array, dtype: jnp.dtype) -> Array:
    return _typed_dot(x_MD, w_DX, dtype)


def _typed_dot(a: Array, b: Array, dtype: jnp.dtype) -> Array:
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return lax.dot(a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)


def _dot_fwd(x_MD: Array, w_DX: Array, dtype: jnp.dtype):
    return _typed_dot(x_MD, w_DX, dtype), (x_MD, w_DX)


def _dot_bwd(dtype: jnp.dtype, saved: tuple[Array, Array], grad_MX: Array):
    x_MD, w_DX = saved
    # Both factors in the compute dtype: a mixed float32 x bfloat16 product is 10 times slower on CPU.
    grad_x = _typed_dot(grad_MX, w_DX.T, dtype)
    grad_w = _typed_dot(x_MD.T, grad_MX, dtype)
    return grad_x.astype(x_MD.dtype), grad_w.astype(w_DX.dtype)


_dot.defvjp(_dot_fwd, _dot_bwd)


def dense(x: Array, w: Array, bias: Array | None = None, *, dtype: jnp.dtype | None = None) -> Array:
    """Contracts the last axis of x with the first axis of w, accumulating in float32.

    A single row is padded to two and a few columns to four: on CPU such bfloat16 products take other paths, 7 times
    slower for one row, whose rounding differs from that of bigger ones.

    Args:
      x: [..., D] float array.
      w: [D, ...] weight.
      bias: added to the result, of w's trailing shape.
      dtype: of both factors; w's own dtype by default.

    Returns:
      float32 [..., *w.shape[1:]].
    """
    lead, trail = x.shape[:-1], w.shape[1:]
    x_MD = x.reshape(-1, x.shape[-1])
    rows = x_MD.shape[0]
    if rows == 1:
        x_MD = jnp.concatenate([x_MD, x_MD])
    w_DX = w.reshape(w.shape[0], -1)
    columns = w_DX.shape[1]
    if columns < FEW_COLUMNS:
        w_DX = jnp.pad(w_DX, ((0, 0), (0, FEW_COLUMNS - columns)))
    out: Array = _dot(x_MD, w_DX, jnp.dtype(dtype or w.dtype))  # pyright: ignore[reportAssignmentType]
    out = out[:rows, :columns].reshape(*lead, *trail)
    return out if bias is None else out + bias.astype(jnp.float32)
