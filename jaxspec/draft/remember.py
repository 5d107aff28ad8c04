"""What a drafter that reads features keeps of each row: something of the last committed position."""

import jax.numpy as jnp

from jaxspec.protocol import Commit
from jaxspec.shapes import Array


def of_rows(kept: Array, commit: Commit) -> Array:
    """What was kept [B, ...] of the rows that a commit is about: of all, or of the one that is prefilled."""
    return kept if commit.row is None else kept[commit.row][None]


def keep_last(kept: Array, found: Array, commit: Commit) -> Array:
    """Keeps of each row the last of its entries that count; rows in which none counts keep what they have.

    Args:
      kept: [B, ...].
      found: entries [B, T, ...] of the commit's positions; B is 1 where one row is prefilled.
      commit: says how many count.
    """
    last_B = jnp.maximum(commit.count_B - 1, 0).reshape(-1, *[1] * (found.ndim - 1))
    new = jnp.take_along_axis(found, last_B, axis=1)[:, 0]
    counts = (commit.count_B > 0).reshape(-1, *[1] * (new.ndim - 1))
    new = jnp.where(counts, new, of_rows(kept, commit))
    return new if commit.row is None else kept.at[commit.row].set(new[0])
