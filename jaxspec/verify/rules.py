"""Verification rules: accept drafts so that the text, or its distribution, stays the target's."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.keys import Purpose, uniform, within_step
from jaxspec.nn.draw import Noise
from jaxspec.nn.steady import row_argmax
from jaxspec.protocol import Proposal, Sampling, Tree, Verdict, VerifyRule
from jaxspec.shapes import Array
from jaxspec.verify.walk import follow


def next_positions(length_B: Array, tree: Tree) -> Array:
    """Returns the position of the token that each node's logits predict, [B, T]."""
    return length_B[:, None] + tree.depth_BT + 1


def greedy(
    proposal: Proposal, score_BTV: Array, live_BN: Array, sampling: Sampling, length_B: Array, tree: Tree
) -> Verdict:
    """Keeps drafts that equal the argmax; ties go to the lower token id."""
    target_BT = row_argmax(score_BTV)
    return follow(target_BT, proposal.token_BN, live_BN, tree)


def match(
    proposal: Proposal, score_BTV: Array, live_BN: Array, sampling: Sampling, length_B: Array, tree: Tree
) -> Verdict:
    """Keeps drafts that equal the token that plain decoding samples at that position with the same noise.

    The committed text is therefore exactly the text of plain sampling with the same seed; rows of temperature 0
    are greedy.
    """
    target_BT = target_noise(sampling, length_B, tree).draw(score_BTV)
    return follow(target_BT, proposal.token_BN, live_BN, tree)


def target_noise(sampling: Sampling, length_B: Array, tree: Tree) -> Noise:
    """Returns the noise with which each node's best score is the token that plain decoding samples."""
    return Noise(sampling.key_BX, next_positions(length_B, tree), sampling.temperature_B > 0, Purpose.TARGET)


def _distributions(proposal: Proposal, score_BTV: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Returns target [B, T, V] and draft [B, N, V] probabilities; greedy rows are point masses."""
    vocab = score_BTV.shape[-1]
    best = jax.nn.one_hot(jnp.argmax(score_BTV, axis=-1), vocab, dtype=jnp.float32)
    p_BTV = jnp.where((sampling.temperature_B > 0)[:, None, None], jax.nn.softmax(score_BTV, axis=-1), best)
    # Not one_hot: XLA for CUDA loses kernels beside a call that returns an array without entries, as for no drafts.
    point = (proposal.token_BN[..., None] == jnp.arange(vocab, dtype=jnp.int32)).astype(jnp.float32)
    if proposal.logp_BNV is None:
        return p_BTV, point
    return p_BTV, jnp.where((sampling.temperature_B > 0)[:, None, None], jnp.exp(proposal.logp_BNV), point)


def _normalize(weight: Array, fallback: Array) -> Array:
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return jnp.where(total > 0, weight / jnp.where(total > 0, total, 1), fallback)


def _draw(prob_BV: Array, sampling: Sampling, position_B: Array) -> Array:
    """Draws the token at a position, which ends a step, of each row."""
    noise = Noise(sampling.key_BX, position_B[:, None], jnp.ones(position_B.shape, bool), Purpose.RESIDUAL)
    return noise.draw(jnp.log(prob_BV)[:, None])[:, 0]


def live_prefix(live_BN: Array) -> Array:
    """Counts the drafts of each chain before the first that is not live."""
    return jnp.sum(jnp.cumprod(live_BN.astype(jnp.int32), axis=1), axis=1)


def conclude(draft_BK: Array, accepted_B: Array, last_B: Array) -> Verdict:
    """Returns the verdict of a chain: the first ``accepted`` drafts and then ``last``."""
    depth_K = jnp.arange(draft_BK.shape[1] + 1, dtype=jnp.int32)[None]
    tokens = jnp.concatenate([draft_BK, draft_BK[:, :1] if draft_BK.shape[1] else last_B[:, None]], axis=1)
    tokens = jnp.where(depth_K == accepted_B[:, None], last_B[:, None], tokens)
    return Verdict(jnp.where(depth_K <= accepted_B[:, None], depth_K, 0), tokens, accepted_B + 1)


def reject(
    proposal: Proposal, score_BTV: Array, live_BN: Array, sampling: Sampling, length_B: Array, tree: Tree
) -> Verdict:
    """Rejection sampling over a tree whose siblings are drawn without replacement (Leviathan 2023; Jeon 2024).

    At a node the residual r starts as p; each sibling c in draw order is accepted with probability min(1, r(c)/q(c)),
    else r becomes norm(max(r - q, 0)) and q loses c. The committed text has the target's distribution. Draft
    siblings must be drawn from the same parent distribution in order; a chain is the case of one sibling.
    """
    p_BTV, q_BNV = _distributions(proposal, score_BTV, sampling)
    rows, nodes, vocab = p_BTV.shape
    coin_BT = draw_coins(sampling, length_B, tree)

    def visit(child: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        here_B, residual, spent = carry
        token_B, parent_B = proposal.token_BN[:, child - 1], tree.parent_BT[:, child]
        q_BV = _normalize(jnp.where(spent, 0.0, q_BNV[:, child - 1]), jnp.zeros((rows, vocab)))
        q_of = jnp.take_along_axis(q_BV, token_B[:, None], axis=1)[:, 0]
        r_of = jnp.take_along_axis(residual, token_B[:, None], axis=1)[:, 0]
        tried_B = (parent_B == here_B) & live_BN[:, child - 1] & (q_of > 0)
        hit_B = tried_B & (coin_BT[:, child] * q_of < r_of)
        lost_B = tried_B & ~hit_B
        reduced = _normalize(jnp.maximum(residual - q_BV, 0.0), residual)
        residual = jnp.where(lost_B[:, None], reduced, jnp.where(hit_B[:, None], p_BTV[:, child], residual))
        spent = (spent | (lost_B[:, None] & jax.nn.one_hot(token_B, vocab, dtype=bool))) & ~hit_B[:, None]
        return jnp.where(hit_B, child, here_B), residual, spent

    # Children come after their parents and in draw order, so one pass over the nodes descends.
    carry = (jnp.zeros(rows, jnp.int32), p_BTV[:, 0], jnp.zeros((rows, vocab), bool))
    here_B, residual, _ = lax.fori_loop(1, nodes, visit, carry) if nodes > 1 else carry
    path_BK, depth_B = tree.path_to(here_B)
    last_B = _draw(residual, sampling, length_B + depth_B + 1)
    verdict = conclude(_path_tokens(proposal, path_BK), depth_B, last_B)
    return Verdict(path_BK, verdict.token_BT, verdict.count_B)


def draw_coins(sampling: Sampling, length_B: Array, tree: Tree) -> Array:
    """Draws one uniform number per node, independent of every other node's and step's."""
    node_T = jnp.arange(tree.nodes, dtype=jnp.int32)
    return uniform(sampling.key_BX, within_step(length_B, node_T[None]), Purpose.ACCEPT)


def _path_tokens(proposal: Proposal, path_BK: Array) -> Array:
    return jnp.take_along_axis(proposal.token_BN, jnp.maximum(path_BK[:, 1:] - 1, 0), axis=1)


def block(
    proposal: Proposal, score_BTV: Array, live_BN: Array, sampling: Sampling, length_B: Array, tree: Tree
) -> Verdict:
    """Block verification of a chain (Sun 2024, 2403.10444): accepts at least as many drafts as ``reject``, same law.

    With p_0 = 1, p_i = min(p_{i-1} Mb(x_i)/Ms(x_i), 1), R_i = sum max(p_i Mb - Ms, 0) and h_i = R_i / (R_i + 1 - p_i)
    (h = p at the end of the block), the number of accepted drafts is the largest i whose coin falls below h_i; the
    next token is drawn from norm(max(p_i Mb - Ms, 0)), or from Mb after the last draft.
    """
    p_BTV, q_BNV = _distributions(proposal, score_BTV, sampling)
    drafts = proposal.token_BN.shape[1]
    length_of_B = live_prefix(live_BN)
    coin_BT = draw_coins(sampling, length_B, tree)
    carried_B = jnp.ones(p_BTV.shape[0], jnp.float32)
    accepted_B = jnp.zeros(p_BTV.shape[0], jnp.int32)
    last_BV = _block_residual(carried_B, p_BTV[:, 0], q_BNV[:, 0], length_of_B > 0) if drafts else p_BTV[:, 0]
    for i in range(1, drafts + 1):
        token = proposal.token_BN[:, i - 1, None]
        ratio = jnp.take_along_axis(p_BTV[:, i - 1], token, 1) / jnp.take_along_axis(q_BNV[:, i - 1], token, 1)
        carried_B = jnp.minimum(carried_B * ratio[:, 0], 1.0)
        inner = i < length_of_B
        residual = p_BTV[:, i] * carried_B[:, None]
        if i < drafts:
            residual = jnp.where(inner[:, None], jnp.maximum(residual - q_BNV[:, i], 0.0), residual)
        total = jnp.sum(residual, axis=-1)
        rest = total + 1 - carried_B
        h_B = jnp.where(inner, jnp.where(rest > 0, total / jnp.where(rest > 0, rest, 1), 1.0), carried_B)
        hit = (i <= length_of_B) & (coin_BT[:, i] < h_B)
        accepted_B = jnp.where(hit, i, accepted_B)
        last_BV = jnp.where(hit[:, None], _normalize(residual, p_BTV[:, i]), last_BV)
    return conclude(proposal.token_BN, accepted_B, _draw(last_BV, sampling, length_B + accepted_B + 1))


def _block_residual(carried_B: Array, p_BV: Array, q_BV: Array, drafted_B: Array) -> Array:
    left = jnp.maximum(carried_B[:, None] * p_BV - q_BV, 0.0)
    return jnp.where(drafted_B[:, None], _normalize(left, p_BV), p_BV)


RULES = {
    rule.name: rule
    for rule in (
        VerifyRule("greedy", greedy, exact=True),
        VerifyRule("match", match, exact=True),
        VerifyRule("reject", reject),
        VerifyRule("block", block),
    )
}


def rule_of(rule: str | VerifyRule) -> VerifyRule:
    """Returns a rule by its name; the laboratory's are rules already."""
    return RULES[rule] if isinstance(rule, str) else rule
