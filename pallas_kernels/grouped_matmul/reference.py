"""Grouped matrix product in plain JAX: every group's matrix times every row, of which those of the group count."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import Quantized, Weight, widen


def grouped_matmul(
    x_RK: jax.Array, size_E: jax.Array, w_EKN: Weight, *, dtype: jnp.dtype, layer: jax.Array | None = None
) -> jax.Array:
    """As ``api.grouped_matmul``."""
    own = w_EKN if layer is None else _entry(w_EKN, layer)
    end_E = jnp.cumsum(size_E)
    row_R = jnp.arange(x_RK.shape[0], dtype=jnp.int32)
    x = x_RK.astype(dtype)

    def add(total_RN: jax.Array, e: jax.Array) -> tuple[jax.Array, None]:
        mine_R = (row_R < end_E[e]) & (row_R >= end_E[e] - size_E[e])
        return jnp.where(mine_R[:, None], _dot(x, _entry(own, e)), total_RN), None

    zeros = jnp.zeros((x_RK.shape[0], own.shape[-1]), jnp.float32)
    return lax.scan(add, zeros, jnp.arange(size_E.shape[0], dtype=jnp.int32))[0]


def _entry(w: Weight, place: jax.Array) -> Weight:
    return jax.tree.map(lambda leaf: leaf[place], w)


def _dot(x: jax.Array, w: Weight) -> jax.Array:
    """Numbers with scales are not rounded to the dtype of x, as in the kernel."""
    if isinstance(w, Quantized) or x.dtype == jnp.float32:
        return jnp.dot(x.astype(jnp.float32), widen(w), precision=lax.Precision.HIGHEST)
    return jnp.dot(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
