"""Drafts drawn from predictions of several depths that were made side by side, none reading the others."""

import jax.numpy as jnp

from jaxspec.draft.draft_scores import NEEDS_DRAFT_PROBS, score_tokens
from jaxspec.draft.draft_selection import empty_selection, select_next
from jaxspec.draft.growth import growth_of
from jaxspec.draft.network_drafter import NetworkDrafter
from jaxspec.protocol import Anchor, DraftCosts, Proposal, no_proposal
from jaxspec.pytree import replace
from jaxspec.shapes import Array


def draft_from(drafter: NetworkDrafter, last_BKD: Array, anchor: Anchor, rule: str, valid_B: Array) -> Proposal:
    """Drafts every node of the drafter's topology: a node's children are tokens of the next depth.

    Args:
      drafter: has the topology and the vocabulary product.
      last_BKD: what that product reads for depths 1 to K.
      anchor: says how rows sample.
      rule: of verification.
      valid_B: rows that have observed enough.
    """
    top = drafter.topology
    if not top.drafts:
        return no_proposal(anchor)
    depth_K = jnp.arange(1, top.max_depth + 1, dtype=jnp.int32)
    scored, drawn = score_tokens(drafter, last_BKD, anchor, depth_K, rule), rule in NEEDS_DRAFT_PROBS
    if top.is_chain:
        token_BN, logp_BKV = scored.best(), scored.logp() if drawn else None
        valid_BN = jnp.broadcast_to(valid_B[:, None], token_BN.shape)
        proposal = Proposal(token_BN, valid_BN, logp_BKV, expert_BKYA=drafter.experts(last_BKD))
        costs = anchor.draft_costs
        return proposal if costs is None else _pruned(proposal, anchor, costs, scored.score_BTW)
    growth = growth_of(top, anchor.token_B.shape[0])
    for k in range(top.max_depth):
        growth.grow(scored.level(k), drawn=drawn)
    return growth.finish(valid_B)


def _pruned(proposal: Proposal, anchor: Anchor, costs: DraftCosts, score_BKW: Array) -> Proposal:
    """Leaves out drafts that do not pay; what they are drawn from depends on none of them."""
    eligible_B = proposal.valid_BN[:, 0] & (anchor.sampling.draft_limit_B > 0)
    expert = proposal.expert_BKYA
    selection = empty_selection(costs, eligible_B, score_BKW.shape[1], None if expert is None else expert.shape[2])
    for k in range(score_BKW.shape[1]):
        selection = select_next(selection, anchor, k, score_BKW[:, k], None if expert is None else expert[:, k])
    return replace(proposal, valid_BN=selection.valid_BN, confidence_BN=selection.confidence_BN)
