"""Maps between a draft vocabulary and the target's."""

import jax.numpy as jnp
import numpy as np

from jaxspec.shapes import Array


def target_to_draft(ids_W: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the draft id of each of the target's tokens, int32 [V]; W for tokens that the draft vocabulary lacks.

    Args:
      ids_W: the target's id of each draft token.
      vocab_size: V.
    """
    draft_id_V = np.full(vocab_size, len(ids_W), np.int32)
    draft_id_V[np.asarray(ids_W)] = np.arange(len(ids_W), dtype=np.int32)
    return draft_id_V


def expand_to_target_vocab(logits: Array, draft_id_V: Array | None) -> Array:
    """Expands logits [..., W] to [..., V], -inf for tokens that the draft vocabulary lacks; None changes nothing."""
    if draft_id_V is None:
        return logits
    lacking = jnp.full((*logits.shape[:-1], 1), -jnp.inf, logits.dtype)
    return jnp.take(jnp.concatenate([logits, lacking], axis=-1), draft_id_V, axis=-1)
