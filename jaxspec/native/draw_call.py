"""The best token of a row of scores with noise: the call of the kernel."""

import jax
import jax.numpy as jnp

from jaxspec.native.product import kernels

Array = jax.Array
TARGET = "jaxspec_draw"


def draw(score_NV: Array, words: tuple[Array, Array], warm_N: Array, token: Array | None) -> Array:
    """Returns the place of each row's best score, int32 [N]; with Gumbel noise where the row is warm.

    Args:
      score_NV: float32.
      words: of the keys that noise is drawn with, uint32 [N] each.
      warm_N: bool, which rows get noise.
      token: int32 ids that the noise belongs to, [V] or [N, V]; None where an id is a place.
    """
    kernels()
    operands = (score_NV, *words, warm_N.astype(jnp.int32), *([] if token is None else [token]))
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(warm_N.shape, jnp.int32))(*operands)
