"""Drafting token by token with a network that continues from its own output, along a chain or level by level."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.window import Window
from jaxspec.draft.draft_scores import NEEDS_DRAFT_PROBS, score_tokens
from jaxspec.draft.draft_selection import DraftSelection, empty_selection, select_next
from jaxspec.draft.growth import growth_of, take
from jaxspec.draft.network_drafter import CachedDrafter
from jaxspec.protocol import Anchor, Proposal, no_proposal
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array


@pytree
class Root:
    """What a drafter already knows at the anchor because it has observed it.

    Attributes:
      last_BTD: what the head reads, T being 1.
      feature: what the first draft's cell continues from, [B, 1, ...].
      valid_B: rows that have observed enough.
    """

    last_BTD: Array
    feature: Any
    valid_B: Array


@pytree
class Chain:
    """A chain while it is drafted, with an entry for every cell.

    Attributes:
      anchor_B: the token that the next cell reads.
      token_BN: tokens drawn so far.
      logp_BNV: what they were drawn from; without entries where the rule does not need it.
      expert_BKYA: experts that the target is predicted to choose, None without a prediction.
      selection: drafts to verify, None for all.
    """

    anchor_B: Array
    token_BN: Array
    logp_BNV: Array
    expert_BKYA: Array | None
    selection: DraftSelection | None

    def proposal(self, drafts: int, root: Root | None) -> Proposal:
        """Returns the first drafts of the rows that have observed enough."""
        token_BN, selection = self.token_BN[:, :drafts], self.selection
        valid_BN = jnp.ones_like(token_BN, bool)
        valid_BN = valid_BN if root is None else valid_BN & root.valid_B[:, None]
        logp_BNV = self.logp_BNV[:, :drafts] if self.logp_BNV.shape[1] else None
        proposal = Proposal(token_BN, valid_BN, logp_BNV, expert_BKYA=self.expert_BKYA)
        if selection is None:
            return proposal
        valid_BN &= selection.valid_BN[:, :drafts]
        return replace(proposal, valid_BN=valid_BN, confidence_BN=selection.confidence_BN[:, :drafts])


def draft(cell: CachedDrafter, state: Any, anchor: Anchor, rule: str, root: Root | None = None) -> tuple[Proposal, Any]:
    """Drafts every node; commits nothing.

    Args:
      cell: runs.
      state: of the cell.
      anchor: where drafting starts.
      rule: of verification.
      root: None where the first cell reads the anchor. Such a chain takes K + 1 cells, the last of which only fills
        the cache: full acceptance then leaves no hole in it. With a root it takes K - 1. The last level of a tree is
        never run: accepted nodes must be observed.
    """
    if root is not None and not cell.topology.drafts:
        return no_proposal(anchor), state
    walk = _chain if cell.topology.is_chain else _tree
    return walk(cell, state, anchor, rule, root)


def _chain(cell: CachedDrafter, state: Any, anchor: Anchor, rule: str, root: Root | None) -> tuple[Proposal, Any]:
    drafts, known = cell.topology.drafts, 0 if root is None else 1
    size = drafts + 1 - known

    def draw(chain: Chain, last_BTD: Array, k: Array) -> Chain:
        """Draws the draft of depth k + 1."""
        scored = score_tokens(cell, last_BTD, anchor, jnp.reshape(k + 1, (1,)), rule)
        token_B1 = scored.best()
        expert_BKYA, selection = chain.expert_BKYA, chain.selection
        expert = None if expert_BKYA is None else cell.experts(last_BTD)
        if expert_BKYA is not None and expert is not None:
            expert_BKYA = _put(expert_BKYA, expert, k)
        if selection is not None:
            sure = cell.confidence(last_BTD)
            parts = (None if x is None else x[:, 0] for x in (expert, sure))
            selection = select_next(selection, anchor, k, scored.score_BTW[:, 0], *parts)
        return Chain(
            token_B1[:, 0],
            _put(chain.token_BN, token_B1, k),
            _put(chain.logp_BNV, scored.logp(), k) if rule in NEEDS_DRAFT_PROBS else chain.logp_BNV,
            expert_BKYA,
            selection,
        )

    def step(k: Array, carry, stage: int = cell.stages):
        state, feature, chain = carry
        start_B = anchor.length_B + k - known
        window = Window(start_B, written=k - known, block=cell.block)
        last, feature, state = cell.run(state, chain.anchor_B[:, None], feature, start_B[:, None], window, stage)
        return state, feature, draw(chain, last, k)

    chain = _empty_chain(cell, anchor, rule, root, size)
    if root is not None:
        chain = draw(chain, root.last_BTD, jnp.int32(0))
    carry = (state, None if root is None else root.feature, chain)
    # Cells with programs of their own are unrolled; the others share the body of one loop.
    first = min(known + cell.stages, size)
    for k in range(known, first):
        carry = step(jnp.int32(k), carry, k - known)
    state, _, chain = _run_shared(step, carry, first, size)
    return chain.proposal(drafts, root), state


def _put(x: Array, new: Array, k: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, new, k, axis=1)


def _empty_chain(cell: CachedDrafter, anchor: Anchor, rule: str, root: Root | None, size: int) -> Chain:
    rows = anchor.token_B.shape[0]
    logp_BNV = jnp.zeros((rows, size if rule in NEEDS_DRAFT_PROBS else 0, cell.vocab_size), jnp.float32)
    expert = None if root is None else jax.eval_shape(cell.experts, root.last_BTD)
    selection = None
    if anchor.draft_costs is not None:
        may_B = anchor.sampling.draft_limit_B > 0
        may_B = may_B if root is None else may_B & root.valid_B
        selection = empty_selection(anchor.draft_costs, may_B, size, None if expert is None else expert.shape[2])
    expert_BKYA = None if expert is None else jnp.zeros((rows, size, *expert.shape[2:]), jnp.int32)
    return Chain(anchor.token_B, jnp.zeros((rows, size), jnp.int32), logp_BNV, expert_BKYA, selection)


def _run_shared(step, carry, first: int, size: int):
    """Runs the cells that share a program; with a selection, only as long as it takes some row's next draft."""
    if first == size:
        return carry
    if carry[2].selection is None:
        return lax.fori_loop(first, size, step, carry)

    def goes_on(at) -> Array:
        k, (_, _, chain) = at
        return (k < size) & jnp.any(chain.selection.going_B)

    return lax.while_loop(goes_on, lambda at: (at[0] + 1, step(*at)), (jnp.int32(first), carry))[1]


def _tree(cell: CachedDrafter, state: Any, anchor: Anchor, rule: str, root: Root | None) -> tuple[Proposal, Any]:
    top, known, written = cell.topology, 0 if root is None else 1, 0
    rows = anchor.token_B.shape[0]
    growth, valid_B = growth_of(top, rows), jnp.ones(rows, bool) if root is None else root.valid_B
    token_BL, feature = anchor.token_B[:, None], None if root is None else root.feature
    path_BLJ = jnp.zeros((rows, 1, 1 - known), jnp.int32)
    for depth in range(top.max_depth):
        if root is not None and depth == 0:
            last = root.last_BTD
        else:
            # Levels lie one after the other in the cache; a node's position along the text is its depth's.
            position_BL = jnp.broadcast_to((anchor.length_B + (depth - known))[:, None], token_BL.shape)
            window = Window(anchor.length_B, path_BTJ=path_BLJ, offset=written, block=cell.block)
            stage = min(depth - known, cell.stages)
            last, feature, state = cell.run(state, token_BL, feature, position_BL, window, stage)
            written += token_BL.shape[1]
        scored = score_tokens(cell, last, anchor, jnp.full(token_BL.shape[1], depth + 1, jnp.int32), rule)
        token_BL, parent_BL = growth.grow(scored, drawn=rule in NEEDS_DRAFT_PROBS)
        feature = jax.tree.map(lambda x, parent_BL=parent_BL: take(x, parent_BL), feature)
        node_BL = jnp.broadcast_to(written + jnp.arange(token_BL.shape[1], dtype=jnp.int32), token_BL.shape)
        path_BLJ = jnp.concatenate([take(path_BLJ, parent_BL), node_BL[..., None]], axis=2)
    return growth.finish(valid_B), state
