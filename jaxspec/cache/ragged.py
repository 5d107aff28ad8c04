"""Of rows of positions those that count, one behind the other, so that products are as long as they need to be."""

import jax.numpy as jnp

from jaxspec.pytree import pytree
from jaxspec.shapes import Array


@pytree
class Ragged:
    """Which of B rows of T positions are computed, in a line of M places.

    Attributes:
      position_M: of each place in the line, which of the B * T positions is there.
      place_BT: place in the line of each position; anything for those that are not there.
      live_M: places that count; behind them the line is filled with positions that do not.
    """

    position_M: Array
    place_BT: Array
    live_M: Array

    def line(self, x: Array) -> Array:
        """Entries [B, T, ...] in the line, [1, M, ...]."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.position_M, axis=0, mode="clip")[None]

    def rows(self, x: Array) -> Array:
        """Entries [1, M, ...] of the line in rows, [B, T, ...]; anything where nothing was computed."""
        return jnp.take(x[0], self.place_BT, axis=0, mode="clip")


def ragged_of(live_BT: Array, places: int) -> Ragged:
    """A line of the positions that count.

    Args:
      live_BT: which do; no more than there are places.
      places: M.
    """
    live_X = live_BT.reshape(-1)
    position_M = jnp.argsort(~live_X, stable=True)[:places].astype(jnp.int32)
    place_X = jnp.cumsum(live_X, dtype=jnp.int32) - 1
    return Ragged(position_M, place_X.reshape(live_BT.shape), live_X[position_M])
