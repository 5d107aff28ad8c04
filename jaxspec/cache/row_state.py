"""State of recurrent layers: what a row has after its committed positions, and the drafts that may follow them.

A state cannot go back. So a forward leaves that after the last position which is text for certain, and of the later
ones what each adds to it; the next forward runs those again that became text. ``docs/recurrent-layers.md``
"""

import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec
from jaxspec.cache.window import Window
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

AT, TAIL, DRAFTS, STATE = "at", "tail", "drafts", "state"


@pytree
class RowState:
    """State of B rows; S, J or both may be missing.

    Attributes:
      at_B: positions that it stands for.
      tail_BJC: convolved channels of the last J of them.
      draft_BWX: channels and gates of the drafts after them.
      state_BHNC: S, float32.
    """

    at_B: Array
    tail_BJC: Array | None
    draft_BWX: Array
    state_BHNC: Array | None


def state_streams(state: tuple[int, int, int] | None, channels: int, taps: int, gates: int) -> dict[str, StreamSpec]:
    """Returns what a recurrent layer caches.

    Args:
      state: heads, key and value channels of S; None for a convolution alone.
      channels: that are convolved over ``taps`` positions.
      taps: 1 for no convolution.
      gates: further numbers of each position.
    """
    streams = {
        AT: StreamSpec(1, 1, dtype="int32", fixed=1),
        DRAFTS: StreamSpec(1, channels + gates, dtype="float32", fixed=0),
    }
    if taps > 1:
        streams[TAIL] = StreamSpec(1, channels, dtype="float32", fixed=taps - 1)
    if state is not None:
        heads, keys, values = state
        streams[STATE] = StreamSpec(heads, values, dtype="float32", fixed=keys)
    return streams


def load_state(cache: LayerCache, window: Window) -> RowState:
    """Reads the rows of a forward; where it begins at position 0, whatever an earlier text left is forgotten."""
    fresh_B = window.start_B == 0

    def read(name: str) -> Array:
        pages_PGZC, base = cache[name], 0 if window.base is None else window.base
        if window.row_B is not None:
            return jnp.take(pages_PGZC, window.row_B + base, axis=0, mode="clip")
        if window.base is None:
            return pages_PGZC
        return lax.dynamic_slice_in_dim(pages_PGZC, base, fresh_B.shape[0], axis=0)

    def known(name: str) -> Array | None:
        if name not in cache:
            return None
        x_BGZC = read(name)
        return jnp.where(fresh_B[:, None, None, None], jnp.zeros((), x_BGZC.dtype), x_BGZC)

    at, tail = known(AT), known(TAIL)
    assert at is not None, "every recurrent layer counts"
    return RowState(at[:, 0, 0, 0], None if tail is None else tail[:, 0], read(DRAFTS)[:, 0], known(STATE))


def store_state(cache: LayerCache, window: Window, new: RowState) -> LayerCache:
    """Writes the rows of a forward."""

    def write(name: str, x: Array) -> Array:
        pages_PGZC, base = cache[name], 0 if window.base is None else window.base
        x_BGZC = x.reshape(-1, *pages_PGZC.shape[1:]).astype(pages_PGZC.dtype)
        if window.row_B is not None:
            return pages_PGZC.at[window.row_B + base].set(x_BGZC, mode="drop")
        return x_BGZC if window.base is None else lax.dynamic_update_slice_in_dim(pages_PGZC, x_BGZC, base, axis=0)

    parts = {AT: new.at_B, TAIL: new.tail_BJC, DRAFTS: new.draft_BWX, STATE: new.state_BHNC}
    return cache | {name: write(name, x) for name, x in parts.items() if x is not None}
