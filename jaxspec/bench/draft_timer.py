"""Drafts often, one proposal after another, so that drafting alone can be timed."""

import jax.numpy as jnp
from jax import lax

from jaxspec.protocol import Anchor, Drafter, DraftState
from jaxspec.pytree import replace
from jaxspec.shapes import Array

PROPOSALS = 16  # drafted per timed call, so that starting the program does not count


def propose_often(drafter: Drafter, draft: DraftState, anchor: Anchor, rule: str) -> Array:
    """Makes ``PROPOSALS`` proposals one after another; to be compiled and timed."""

    def one(_: Array, carry: tuple[DraftState, Array]):
        draft, token_B = carry
        # Each proposal starts from the one before, or XLA would draft once and reuse it.
        moved = replace(anchor, token_B=token_B, length_B=anchor.length_B - (token_B & 1))
        proposal, draft = drafter.propose(draft, moved, rule)
        return draft, jnp.sum(proposal.token_BN, axis=1, dtype=jnp.int32) % 2

    return lax.fori_loop(0, PROPOSALS, one, (draft, anchor.token_B))[1]
