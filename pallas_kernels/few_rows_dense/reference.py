"""Few-row products in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import Weight, widen


def few_rows_dense(x_MD: jax.Array, w: Weight, *, dtype: jnp.dtype, layer: jax.Array | None) -> jax.Array:
    """As ``api.few_rows_dense``, without a bias."""
    if layer is not None:
        w = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer.reshape(()), keepdims=False), w)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    w_DN = widen(w).astype(dtype)
    if dtype == jnp.bfloat16:  # or XLA:GPU leaves out the rounding of a single row, whose product it fuses
        x_MD = lax.reduce_precision(x_MD, 8, 7)
    return jnp.dot(x_MD.astype(dtype), w_DN, precision=precision, preferred_element_type=jnp.float32)
