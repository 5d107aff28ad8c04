"""Drafting token by token with a network that continues from its own output, along a chain or level by level."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.window import Window
from jaxspec.draft.draft_selection import DraftSelection, empty_selection, select_next
from jaxspec.draft.growth import growth_of, take
from jaxspec.draft.network_drafter import CachedDrafter, NetworkDrafter
from jaxspec.keys import Purpose, gumbel, within_step
from jaxspec.protocol import Anchor, Proposal, no_proposal
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array

NEEDS_DRAFT_PROBS = ("reject", "block")
BANNED_DRAFT = -1e4


@pytree
class Root:
    """What a drafter knows behind the anchor because it has observed it.

    Attributes:
      last_BTD: what the head reads, T being 1.
      feature: what the first draft's cell continues from, [B, 1, ...].
      valid_B: rows that have observed enough.
    """

    last_BTD: Array
    feature: Any
    valid_B: Array


def draft(cell: CachedDrafter, state: Any, anchor: Anchor, rule: str, root: Root | None = None) -> tuple[Proposal, Any]:
    """Drafts every node; commits nothing.

    Args:
      cell: runs.
      state: of the cell.
      anchor: where drafting starts.
      rule: of verification.
      root: None where the first cell reads the anchor. Such a chain takes K + 1 cells, the last of which only fills
        the cache, so that full acceptance leaves no hole in it; with a root it takes K - 1. The last level of a tree is
        never run: what is accepted must be observed.
    """
    if root is not None and not cell.topology.drafts:
        return no_proposal(anchor), state
    walk = _chain if cell.topology.is_chain else _tree
    return walk(cell, state, anchor, rule, root)


def scores(drafter: NetworkDrafter, last_BTD: Array, anchor: Anchor, depth_T: Array, rule: str) -> tuple[Array, Array]:
    """Scores at each row's temperature (log-probabilities where the rule needs them), and with ranking noise.

    Args:
      drafter: knows the head.
      last_BTD: what the head reads.
      anchor: knows how rows sample.
      depth_T: depth of what is drawn.
      rule: of verification.
    """
    logits = _biased(drafter.logits(last_BTD), anchor)
    if rule == "greedy":
        return logits, logits
    warm_B = (anchor.sampling.temperature_B > 0)[:, None, None]
    score = logits / jnp.where(warm_B, anchor.sampling.temperature_B[:, None, None], 1.0)
    # match: the target's own noise, so that drafts agree; reject and block need draws that no other step sees.
    purpose, place_BT = Purpose.TARGET, anchor.length_B[:, None] + depth_T[None]
    if rule != "match":
        score = jax.nn.log_softmax(score)
        purpose, place_BT = Purpose.DRAFT, within_step(anchor.length_B, jnp.broadcast_to(depth_T[None], place_BT.shape))

    def noisy(score: Array) -> Array:
        noise = gumbel(anchor.sampling.key_BX, place_BT, purpose, score.shape[-1])
        return jnp.where(warm_B, score + noise, score)

    return score, lax.cond(jnp.any(warm_B), noisy, lambda x: x, score)


def _biased(logits_BTV: Array, anchor: Anchor) -> Array:
    """Logits with each row's bias, so that drafts are what may follow.

    What may not is far below all else and not -inf, for a draft may know nothing else. Without a question whether some
    row is biased, which would cost a GPU more than the sum does.
    """
    if anchor.bias_BV is None:
        return logits_BTV
    bias_BV = jnp.maximum(anchor.bias_BV, BANNED_DRAFT)
    return jnp.where(anchor.sampling.biased_B[:, None, None], logits_BTV + bias_BV[:, None], logits_BTV)


def _chain(cell: CachedDrafter, state: Any, anchor: Anchor, rule: str, root: Root | None):
    rows, drafts, wants_logp = anchor.token_B.shape[0], cell.topology.drafts, rule in NEEDS_DRAFT_PROBS
    known = 0 if root is None else 1

    def draw(last_BTD: Array, k: Array, drawn):
        """Draws the draft of depth k + 1."""
        _, token_BN, logp_BNV, expert_BKYA, kept = drawn
        logp, score = scores(cell, last_BTD, anchor, jnp.reshape(k + 1, (1,)), rule)
        token_B = jnp.argmax(score[:, 0], axis=-1).astype(jnp.int32)
        token_BN = lax.dynamic_update_slice_in_dim(token_BN, token_B[:, None], k, axis=1)
        if wants_logp:
            logp_BNV = lax.dynamic_update_slice_in_dim(logp_BNV, logp, k, axis=1)
        guess = None if expert_BKYA is None else cell.experts(last_BTD)
        if expert_BKYA is not None and guess is not None:
            expert_BKYA = lax.dynamic_update_slice_in_dim(expert_BKYA, guess, k, axis=1)
        if kept is not None:
            kept = select_next(kept, anchor, k, logp[:, 0], None if guess is None else guess[:, 0])
        return token_B, token_BN, logp_BNV, expert_BKYA, kept

    def step(k: Array, carry, stage: int = cell.stages):
        state, feature, drawn = carry
        start_B = anchor.length_B + k - known
        window = Window(start_B, block=cell.block)
        last, feature, state = cell.run(state, drawn[0][:, None], feature, start_B[:, None], window, stage)
        return state, feature, draw(last, k, drawn)

    # Without a root there is one place more than drafts: that of the last cell.
    room = drafts + 1 - known
    logp_BNV = jnp.zeros((rows, room if wants_logp else 0, cell.vocab_size), jnp.float32)
    guessed = None if root is None else jax.eval_shape(cell.experts, root.last_BTD)
    guesses = None if guessed is None else jnp.zeros((rows, room, *guessed.shape[2:]), jnp.int32)
    kept = None
    if anchor.draft_costs is not None:
        may_B = anchor.sampling.draft_limit_B > 0
        may_B = may_B if root is None else may_B & root.valid_B
        kept = empty_selection(anchor.draft_costs, may_B, room, None if guessed is None else guessed.shape[2])
    drawn = (anchor.token_B, jnp.zeros((rows, room), jnp.int32), logp_BNV, guesses, kept)
    if root is not None:
        drawn = draw(root.last_BTD, jnp.int32(0), drawn)
    carry = (state, None if root is None else root.feature, drawn)
    first = min(known + cell.stages, room)
    for k in range(known, first):
        carry = step(jnp.int32(k), carry, k - known)
    state, _, drawn = _further(step, carry, first, room, kept is not None)
    _, token_BN, logp_BNV, expert_BKYA, kept = drawn
    return _proposal(root, token_BN[:, :drafts], logp_BNV[:, :drafts] if wants_logp else None, expert_BKYA, kept), state


def _further(step, carry, first: int, room: int, may_stop: bool):
    """The cells that share a program; where drafts are cut, only as long as some row's draft is verified."""
    if first == room:
        return carry
    if not may_stop:
        return lax.fori_loop(first, room, step, carry)

    def goes_on(found) -> Array:
        k, (_, _, (*_, kept)) = found
        return (k < room) & jnp.any(kept.going_B)

    return lax.while_loop(goes_on, lambda found: (found[0] + 1, step(*found)), (jnp.int32(first), carry))[1]


def _proposal(
    root: Root | None, token_BN: Array, logp_BNV: Array | None, expert_BKYA: Array | None, kept: DraftSelection | None
) -> Proposal:
    valid_BN = jnp.ones_like(token_BN, bool)
    valid_BN = valid_BN if root is None else valid_BN & root.valid_B[:, None]
    proposal = Proposal(token_BN, valid_BN, logp_BNV, expert_BKYA=expert_BKYA)
    if kept is None:
        return proposal
    drafts = token_BN.shape[1]
    return replace(
        proposal, valid_BN=valid_BN & kept.valid_BN[:, :drafts], confidence_BN=kept.confidence_BN[:, :drafts]
    )


def _tree(cell: CachedDrafter, state: Any, anchor: Anchor, rule: str, root: Root | None):
    top, known, written = cell.topology, 0 if root is None else 1, 0
    rows = anchor.token_B.shape[0]
    growth, valid_B = growth_of(top, rows), jnp.ones(rows, bool) if root is None else root.valid_B
    token_BL, feature = anchor.token_B[:, None], None if root is None else root.feature
    path_BLJ = jnp.zeros((rows, 1, 1 - known), jnp.int32)
    for depth in range(top.max_depth):
        if root is not None and depth == 0:
            last = root.last_BTD
        else:
            position_BL = jnp.broadcast_to((anchor.length_B + (depth - known))[:, None], token_BL.shape)
            window = Window(anchor.length_B, path_BTJ=path_BLJ, offset=written, block=cell.block)
            stage = min(depth - known, cell.stages)
            last, feature, state = cell.run(state, token_BL, feature, position_BL, window, stage)
            written += token_BL.shape[1]
        logp, score = scores(cell, last, anchor, jnp.full(token_BL.shape[1], depth + 1, jnp.int32), rule)
        token_BL, parent_BL = growth.grow(score, logp if rule in NEEDS_DRAFT_PROBS else None)
        feature = jax.tree.map(lambda x, parent_BL=parent_BL: take(x, parent_BL), feature)
        place_BL = jnp.broadcast_to(written + jnp.arange(token_BL.shape[1], dtype=jnp.int32), token_BL.shape)
        path_BLJ = jnp.concatenate([take(path_BLJ, parent_BL), place_BL[..., None]], axis=2)
    return growth.finish(valid_B), state
