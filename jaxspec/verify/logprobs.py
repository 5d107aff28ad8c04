"""Raw log-probabilities of given tokens with their ranks, and of the most likely tokens."""

import jax.numpy as jnp
from jax import lax

from jaxspec.nn.steady import exp, row_max, row_sum
from jaxspec.protocol import Verdict
from jaxspec.shapes import Array


def ranked(logits_BTV: Array, token_BT: Array, most: int) -> tuple[Array, Array]:
    """Returns log-probabilities of each token and of the best ones, its rank from 1 and their ids, [B, T, most + 1]."""
    low_BTV = logits_BTV - row_max(logits_BTV)
    logp_BTV = low_BTV - jnp.log(row_sum(exp(low_BTV)))  # the same bits for any number of rows
    own_BT1 = jnp.take_along_axis(logp_BTV, token_BT[..., None], axis=-1)
    rank_BT1 = jnp.sum(logp_BTV > own_BT1, axis=-1, keepdims=True, dtype=jnp.int32) + 1
    if most == 0:
        return own_BT1, rank_BT1
    best, ids = lax.top_k(logp_BTV, most)
    return jnp.concatenate([own_BT1, best], -1), jnp.concatenate([rank_BT1, ids.astype(jnp.int32)], -1)


def along_path(logits_BTV: Array, verdict: Verdict, wanted_B: Array, most: int) -> tuple[Array, Array]:
    """Returns what ``ranked`` does for committed tokens, computed only in steps in which some row wants it.

    Args:
      logits_BTV: raw logits of the nodes.
      verdict: path and tokens.
      wanted_B: log-probabilities that each row wants, -1 for none.
      most: most that a row may want; 0 computes nothing.
    """
    shape = (*verdict.token_BT.shape, most + 1)
    empty = jnp.zeros(shape), jnp.zeros(shape, jnp.int32)
    if most == 0:
        return empty

    def compute() -> tuple[Array, Array]:
        along = jnp.take_along_axis(logits_BTV, verdict.path_BT[..., None], axis=1)
        return ranked(along, verdict.token_BT, most)

    return lax.cond(jnp.any(wanted_B >= 0), compute, lambda: empty)
