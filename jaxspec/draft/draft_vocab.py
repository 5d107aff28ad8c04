"""The part of the target's vocabulary that a head drafts from."""

import jax.numpy as jnp
import numpy as np

from jaxspec.pytree import pytree
from jaxspec.shapes import Array


@pytree
class DraftVocab:
    """Which W of the target's V tokens are drafted.

    Attributes:
      token_W: the target's id of each draft token.
      draft_id_V: draft id of each of the target's tokens; W for those that are not drafted.
    """

    token_W: Array
    draft_id_V: Array

    @classmethod
    def of(cls, ids_W: np.ndarray, vocab_size: int) -> "DraftVocab":
        """Makes it of the target's id of each draft token, and V."""
        draft_id_V = np.full(vocab_size, len(ids_W), np.int32)
        draft_id_V[np.asarray(ids_W)] = np.arange(len(ids_W), dtype=np.int32)
        return cls(jnp.asarray(ids_W, jnp.int32), jnp.asarray(draft_id_V))


def make_draft_vocab(ids_W: np.ndarray | None, vocab_size: int) -> DraftVocab | None:
    """Returns the part of the vocabulary, None where it is all of it.

    Args:
      ids_W: the target's id of each draft token; None for all.
      vocab_size: V.
    """
    return None if ids_W is None else DraftVocab.of(ids_W, vocab_size)


def expand_to_target_vocab(x: Array, vocab: DraftVocab | None) -> Array:
    """Expands numbers of draft tokens [..., W] to [..., V], -inf for tokens not drafted; None changes nothing."""
    if vocab is None:
        return x
    lacking = jnp.full((*x.shape[:-1], 1), -jnp.inf, x.dtype)
    return jnp.take(jnp.concatenate([x, lacking], axis=-1), vocab.draft_id_V, axis=-1)
