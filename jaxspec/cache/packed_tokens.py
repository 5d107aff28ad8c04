"""Packs the live positions of a batch into one contiguous row, so that matmuls skip the others."""

import jax.numpy as jnp

from jaxspec.pytree import pytree
from jaxspec.shapes import Array


@pytree
class PackedTokens:
    """Which M of B rows of T positions are computed.

    Attributes:
      position_M: which of the B * T positions each packed entry is.
      index_BT: packed index of each position; anything for those that are left out.
      live_M: entries whose results are used; the rest fills the row up.
    """

    position_M: Array
    index_BT: Array
    live_M: Array

    def pack(self, x: Array) -> Array:
        """Packs entries [B, T, ...] into [1, M, ...]."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.position_M, axis=0, mode="clip")[None]

    def unpack(self, x: Array) -> Array:
        """Puts entries [1, M, ...] back into rows [B, T, ...], with anything where nothing was computed."""
        return jnp.take(x[0], self.index_BT, axis=0, mode="clip")


def pack_live(live_BT: Array, size: int) -> PackedTokens:
    """Packs the live positions.

    Args:
      live_BT: which are; no more than ``size``.
      size: M.
    """
    live_X = live_BT.reshape(-1)
    position_M = jnp.argsort(~live_X, stable=True)[:size].astype(jnp.int32)
    index_X = jnp.cumsum(live_X, dtype=jnp.int32) - 1
    return PackedTokens(position_M, index_X.reshape(live_BT.shape), live_X[position_M])
