"""State that a drafter keeps per row of its last committed position."""

import jax.numpy as jnp

from jaxspec.protocol import Commit
from jaxspec.shapes import Array


def committed_rows(state: Array, commit: Commit) -> Array:
    """Returns the state [B, ...] of the rows of a commit: all rows when decoding, some in prefill."""
    return state if commit.row_B is None else state[commit.row_B]


def last_index(commit: Commit) -> Array:
    """Returns the index of each row's last valid entry, int32 [B]; 0 where there is none."""
    return jnp.maximum(commit.count_B - 1, 0)


def gather_last(x: Array, commit: Commit) -> Array:
    """Takes each row's last valid entry of [B, T, ...]."""
    return jnp.take_along_axis(x, last_index(commit).reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]


def scatter_last(state: Array, new: Array, commit: Commit) -> Array:
    """Replaces the state [B, ...] of the commit's rows by ``new``; rows without a valid entry keep theirs."""
    valid = (commit.count_B > 0).reshape(-1, *[1] * (new.ndim - 1))
    new = jnp.where(valid, new, committed_rows(state, commit))
    return new if commit.row_B is None else state.at[commit.row_B].set(new)
