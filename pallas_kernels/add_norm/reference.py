"""Adding and normalizing in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def add_norm(
    x_MD: jax.Array, scale: jax.Array, norm: Any, parts: Any, *, layer: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """As ``api.add_norm``."""

    def own(x: jax.Array) -> jax.Array:
        return (x if layer is None else x[layer]).astype(jnp.float32)

    if parts is not None:
        x_MD = x_MD + jnp.sum(parts.part_SMD, axis=0)
        x_MD = x_MD if parts.bias is None else x_MD + own(parts.bias)
    normed_MD = x_MD * lax.rsqrt(jnp.mean(x_MD * x_MD, axis=-1, keepdims=True) + norm.eps) * (own(scale) + norm.offset)
    if not norm.dtype:
        return x_MD, normed_MD, None
    rows, width = x_MD.shape
    copy_PMX = jnp.moveaxis(normed_MD.reshape(rows, width // norm.planes, norm.planes), 2, 0)
    return x_MD, normed_MD, copy_PMX.astype(norm.dtype)
