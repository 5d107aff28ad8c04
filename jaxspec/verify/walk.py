"""Walks the accepted path of a tree, and cuts verdicts at stops and limits."""

import jax
import jax.numpy as jnp

from jaxspec.protocol import Proposal, Sampling, Tree, Verdict
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array


@pytree
class Ends:
    """Rows that a step ended, bool [B].

    Attributes:
      stopped_B: at a stop id.
      full_B: at their length limit.
      broken_B: because no token could be sampled, see ``unsound``.
    """

    stopped_B: Array
    full_B: Array
    broken_B: Array

    @property
    def any_B(self) -> Array:
        """Rows that ended for whatever reason."""
        return self.stopped_B | self.full_B | self.broken_B


def usable(proposal: Proposal, sampling: Sampling, tree: Tree) -> Array:
    """Returns whether each draft may be accepted: a real proposal within the row's speculation length, [B, N]."""
    return proposal.valid_BN & (tree.depth_BT[:, 1:] <= sampling.draft_limit_B[:, None])


def follow(target_BT: Array, token_BN: Array, live_BN: Array, tree: Tree) -> Verdict:
    """Accepts every node that equals the target's token at its parent, from the root on.

    Args:
      target_BT: the token that the target samples after each node.
      token_BN: drafted tokens.
      live_BN: nodes that may be accepted.
      tree: of equal siblings the first one stands for all.
    """
    if tree.is_chain:
        hit_BN = live_BN & (token_BN == target_BT[:, :-1])
        node_B = jnp.argmin(jnp.pad(hit_BN, ((0, 0), (0, 1))), axis=1).astype(jnp.int32)
    else:
        node_B = jnp.zeros(target_BT.shape[0], jnp.int32)
        for _ in range(tree.max_depth):  # where no child is right, the node stays
            wanted_B1 = jnp.take_along_axis(target_BT, node_B[:, None], axis=1)
            hit_BN = live_BN & (tree.parent_BT[:, 1:] == node_B[:, None]) & (token_BN == wanted_B1)
            child_B = jnp.argmax(hit_BN, axis=1).astype(jnp.int32) + 1
            node_B = jnp.where(jnp.any(hit_BN, axis=1), child_B, node_B)
    path_BK, depth_B = tree.path_to(node_B)
    return Verdict(path_BK, jnp.take_along_axis(target_BT, path_BK, axis=1), depth_B + 1)


def unsound(logits_BTV: Array, score_BTV: Array, verdict: Verdict, *, exact: bool) -> Array:
    """Returns which tokens, [B, K + 1], could not be sampled: a score is NaN, all are -inf, or a logit is infinite.

    Args:
      logits_BTV: raw target logits.
      score_BTV: processed scores of each node, without noise.
      verdict: what a rule accepts.
      exact: whether each token is the best of its node's scores with noise: a NaN is the best of any then, and one
        score tells all.
    """
    if not exact:
        return ~jnp.isfinite(jnp.take_along_axis(jnp.max(score_BTV, axis=-1), verdict.path_BT, axis=1))
    # Row by row: on a mesh that splits rows no logit has to leave its device.
    of_row = jax.vmap(lambda x_TV, path_T, token_T: x_TV[path_T, token_T])
    logit_BT, score_BT = (of_row(x, verdict.path_BT, verdict.token_BT) for x in (logits_BTV, score_BTV))
    # A tiny repetition penalty may make a score infinite, but not a logit.
    return ~jnp.isfinite(logit_BT) | ~(score_BT > -jnp.inf)


def stop_at(
    verdict: Verdict, sampling: Sampling, length_B: Array, active_B: Array, unsound_BT: Array
) -> tuple[Verdict, Ends]:
    """Cuts a verdict at what could not be sampled, after the first stop id and at the row's longest length.

    Idle rows commit nothing.

    Args:
      verdict: tokens that the rule accepts.
      sampling: stop ids and limits.
      length_B: position of the anchor.
      active_B: rows in use.
      unsound_BT: tokens that could not be sampled.

    Returns:
      The cut verdict, and the rows that end.
    """
    depth_K = jnp.arange(verdict.token_BT.shape[1], dtype=jnp.int32)
    room_B = sampling.max_length_B - length_B - 1
    whole_B = jnp.minimum(verdict.count_B, room_B)
    unsound_BT &= depth_K[None] < whole_B[:, None]
    count_B = jnp.where(jnp.any(unsound_BT, axis=1), jnp.argmax(unsound_BT, axis=1).astype(jnp.int32), whole_B)
    is_stop = jnp.any(verdict.token_BT[..., None] == sampling.stop_BX[:, None], axis=-1)
    is_stop &= depth_K[None] < count_B[:, None]
    first_B = jnp.argmax(is_stop, axis=1).astype(jnp.int32)
    stopped_B = jnp.any(is_stop, axis=1) & active_B
    count_B = jnp.where(stopped_B, first_B + 1, count_B)
    count_B = jnp.where(active_B, count_B, 0)
    full_B = active_B & ~stopped_B & (count_B >= room_B)
    broken_B = active_B & ~stopped_B & jnp.any(unsound_BT, axis=1)
    return replace(verdict, count_B=count_B), Ends(stopped_B, full_B, broken_B)
