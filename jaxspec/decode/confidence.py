"""What became of drafts by how confident the drafter was of them."""

import jax.numpy as jnp

from jaxspec.draft.draft_selection import step_of
from jaxspec.shapes import Array


def outcomes(confidence_BN: Array, live_BN: Array, accepted_B: Array, warm_B: Array, steps: int) -> Array:
    """Drafts that were tried (H = 0), and accepted (H = 1), by the kind of row and confidence, float32 [2, M, C].

    A draft of a chain is tried if it is verified and all before it are accepted.

    Args:
      confidence_BN: of each draft, before it was drawn.
      live_BN: drafts that are verified, and whose outcome counts.
      accepted_B: how many were accepted.
      warm_B: rows that sample.
      steps: C, equal steps of confidence.
    """
    place_N = jnp.arange(live_BN.shape[1], dtype=jnp.int32)
    tried_BN = live_BN & (place_N <= accepted_B[:, None])
    hit_BN = tried_BN & (place_N < accepted_B[:, None])
    kind_BN = warm_B.astype(jnp.int32)[:, None] * steps + step_of(confidence_BN, steps)
    found_HX = jnp.zeros((2, 2 * steps))
    for which, counted_BN in enumerate((tried_BN, hit_BN)):
        found_HX = found_HX.at[which, kind_BN].add(counted_BN.astype(jnp.float32))
    return found_HX.reshape(2, 2, steps)
