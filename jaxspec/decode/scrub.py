"""Zeros what is not finite in the caches, so that a broken request leaves nothing to later ones in its row."""

import jax
import jax.numpy as jnp

from jaxspec.cache.addressing import from_stored
from jaxspec.decode.state import DecodeState
from jaxspec.pytree import replace
from jaxspec.shapes import Array


def scrub(state: DecodeState) -> DecodeState:
    """Zeros every NaN and infinity in the caches of the target and the drafter.

    Attention gives no weight to entries that a row does not see, but no weight times NaN is NaN.

    Args:
      state: donated.
    """
    layers, draft = jax.tree.map(_finite, (state.layers, state.draft))
    return replace(state, layers=layers, draft=draft)


def _finite(x: Array) -> Array:
    value = from_stored(x)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return x
    return jnp.where(jnp.isfinite(value.astype(jnp.float32)), x, jnp.zeros((), x.dtype))
