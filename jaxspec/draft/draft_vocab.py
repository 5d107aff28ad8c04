"""The tokens that drafts are chosen from: a part of the target's vocabulary, or a few candidates of each node."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array


@pytree
class DraftVocab:
    """Which W of the target's V tokens are drafted.

    Attributes:
      token: the target's id of each draft token, [W].
      draft_id_V: draft id of each of the target's tokens; W for those that are not drafted.
    """

    token: Array
    draft_id_V: Array

    @classmethod
    def of(cls, ids_W: np.ndarray, vocab_size: int) -> "DraftVocab":
        """Makes it of the target's id of each draft token, and V."""
        draft_id_V = np.full(vocab_size, len(ids_W), np.int32)
        draft_id_V[np.asarray(ids_W)] = np.arange(len(ids_W), dtype=np.int32)
        return cls(jnp.asarray(ids_W, jnp.int32), jnp.asarray(draft_id_V))

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.draft_id_V.shape[0]

    def ids(self, index_BTX: Array) -> Array:
        """Returns the target's ids of draft tokens."""
        return self.token[index_BTX]

    def pick(self, x_BTV: Array) -> Array:
        """Returns the numbers of the draft tokens, [B, T, W], out of those of all tokens."""
        return x_BTV[..., self.token]

    def expand(self, x_BTW: Array) -> Array:
        """Expands numbers of draft tokens to [B, T, V], -inf for tokens that are not drafted."""
        lacking = jnp.full((*x_BTW.shape[:-1], 1), -jnp.inf, x_BTW.dtype)
        return jnp.take(jnp.concatenate([x_BTW, lacking], axis=-1), self.draft_id_V, axis=-1)


@pytree
class Candidates:
    """The tokens that each node's draft is chosen from.

    Attributes:
      token: their ids, [B, T, W].
      vocab_size: V of the target.
    """

    token: Array
    vocab_size: int = static()

    def ids(self, index_BTX: Array) -> Array:
        """Returns the target's ids of candidates."""
        return jnp.take_along_axis(self.token, index_BTX, axis=-1)

    def pick(self, x_BTV: Array) -> Array:
        """Returns the numbers of the candidates, [B, T, W], out of those of all tokens."""
        every = jnp.broadcast_to(x_BTV, (*self.token.shape[:2], x_BTV.shape[-1]))
        return jnp.take_along_axis(every, self.token, axis=-1)

    def expand(self, x_BTW: Array) -> Array:
        """Expands numbers of candidates to [B, T, V], -inf for all other tokens."""
        rows, count = self.token.shape[:2]
        row_B11 = jnp.arange(rows, dtype=jnp.int32)[:, None, None]
        node_T1 = jnp.arange(count, dtype=jnp.int32)[:, None]
        every = jnp.full((rows, count, self.vocab_size), -jnp.inf)
        return every.at[row_B11, node_T1, self.token].set(x_BTW)


def make_draft_vocab(ids_W: np.ndarray | None, vocab_size: int) -> DraftVocab | None:
    """Returns the part of the vocabulary, None where it is all of it.

    Args:
      ids_W: the target's id of each draft token; None for all.
      vocab_size: V.
    """
    return None if ids_W is None else DraftVocab.of(ids_W, vocab_size)
