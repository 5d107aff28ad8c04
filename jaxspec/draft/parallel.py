"""Drafts drawn from predictions of several depths that were made side by side, none reading the others."""

import jax.numpy as jnp

from jaxspec.draft.autoregress import NEEDS_DRAFT_PROBS, scores
from jaxspec.draft.draft_selection import empty_selection, select_next
from jaxspec.draft.growth import growth_of
from jaxspec.draft.network_drafter import NetworkDrafter
from jaxspec.protocol import Anchor, Proposal, no_proposal
from jaxspec.pytree import replace
from jaxspec.shapes import Array


def draft_from(drafter: NetworkDrafter, last_BKD: Array, anchor: Anchor, rule: str, valid_B: Array) -> Proposal:
    """Drafts every node of the scorer's topology: a node's children are tokens of the next depth.

    Args:
      drafter: knows the topology and the vocabulary product.
      last_BKD: what that product reads for depths 1 to K.
      anchor: knows how rows sample.
      rule: of verification.
      valid_B: rows that have observed enough.
    """
    top = drafter.topology
    rows, wants_logp = anchor.token_B.shape[0], rule in NEEDS_DRAFT_PROBS
    if not top.drafts:
        return no_proposal(anchor)
    depth_K = jnp.arange(1, top.max_depth + 1, dtype=jnp.int32)
    logp_BKV, score_BKV = scores(drafter, last_BKD, anchor, depth_K, rule)
    if top.is_chain:
        token_BN = jnp.argmax(score_BKV, axis=-1).astype(jnp.int32)
        valid_BN = jnp.broadcast_to(valid_B[:, None], token_BN.shape)
        proposal = Proposal(token_BN, valid_BN, logp_BKV if wants_logp else None, expert_BKYA=drafter.experts(last_BKD))
        return proposal if anchor.draft_costs is None else _cut(proposal, anchor, logp_BKV)
    growth = growth_of(top, rows)
    for k in range(top.max_depth):
        growth.grow(score_BKV[:, k : k + 1], logp_BKV[:, k : k + 1] if wants_logp else None)
    return growth.finish(valid_B)


def _cut(proposal: Proposal, anchor: Anchor, score_BKV: Array) -> Proposal:
    """Leaves out drafts that do not pay; what they are drawn from depends on none of them."""
    assert anchor.draft_costs is not None, "only drafts with prices are cut"
    may_B = proposal.valid_BN[:, 0] & (anchor.sampling.draft_limit_B > 0)
    guess = proposal.expert_BKYA
    kept = empty_selection(anchor.draft_costs, may_B, score_BKV.shape[1], None if guess is None else guess.shape[2])
    for k in range(score_BKV.shape[1]):
        kept = select_next(kept, anchor, k, score_BKV[:, k], None if guess is None else guess[:, k])
    return replace(proposal, valid_BN=kept.valid_BN, confidence_BN=kept.confidence_BN)
