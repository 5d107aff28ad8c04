"""What a drafter that reads features keeps of each row: something of the last committed position."""

import jax.numpy as jnp

from jaxspec.protocol import Commit
from jaxspec.shapes import Array


def committed_rows(kept: Array, commit: Commit) -> Array:
    """What was kept [B, ...] of the rows that a commit is about: of all, or of the one that is prefilled."""
    return kept if commit.row is None else kept[commit.row][None]


def last_index(commit: Commit) -> Array:
    """Place of each row's last entry that counts, int32 [B]; 0 where none does."""
    return jnp.maximum(commit.count_B - 1, 0)


def gather_last(found: Array, commit: Commit) -> Array:
    """Of entries [B, T, ...] of the commit's positions each row's last that counts, [B, ...]."""
    return jnp.take_along_axis(found, last_index(commit).reshape(-1, *[1] * (found.ndim - 1)), axis=1)[:, 0]


def scatter_last(kept: Array, new: Array, commit: Commit) -> Array:
    """Keeps of each row what was found at its last position; rows in which none counts keep what they have.

    Args:
      kept: [B, ...].
      new: the same of the commit's rows; B is 1 where one row is prefilled.
      commit: says how many positions count.
    """
    counts = (commit.count_B > 0).reshape(-1, *[1] * (new.ndim - 1))
    new = jnp.where(counts, new, committed_rows(kept, commit))
    return new if commit.row is None else kept.at[commit.row].set(new[0])
