"""Products per head in plain JAX."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_entries import turn
from pallas_kernels.quantized import Weight, widen


def heads_dense(
    x_SMHC: jax.Array, w: Weight, cut: Any, *, dtype: jnp.dtype, layer: jax.Array | None, where: Mapping[str, jax.Array]
) -> jax.Array:
    """As ``api.heads_dense``."""
    if layer is not None:
        w = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer.reshape(()), keepdims=False), w)
    w_HXR = widen(w, dtype)[:, cut.first : cut.first + cut.count]
    x_MHC = jnp.sum(x_SMHC.astype(jnp.float32), axis=0)
    x_MHC = x_MHC * where["factor"][:, None, None] if "factor" in where else x_MHC
    depth = x_MHC.shape[2] - cut.further
    rows_MHC, further_MHC = x_MHC[..., :depth], x_MHC[..., depth:]
    if dtype == jnp.bfloat16:  # or XLA leaves the rounding out, as it widens the factors again
        rows_MHC = lax.reduce_precision(rows_MHC, 8, 7)
    # Rounded factors in float32, for XLA:CPU has no such products of bfloat16; their products are exact either way.
    rows_MHC, w_HXR = (x.astype(dtype).astype(jnp.float32) for x in (rows_MHC, w_HXR))
    letters = "mhr,hxr->mhx" if cut.from_rank else "mhx,hxr->mhr"
    out = jnp.einsum(letters, rows_MHC, w_HXR, precision=lax.Precision.HIGHEST)
    if not cut.further:
        return out
    if "cos" in where:
        angles = where["cos"], where["sin"]
        further_MHC = turn(further_MHC, angles, 0, cut.further, interleaved=cut.interleaved)
    return jnp.concatenate([out, further_MHC], axis=-1)
