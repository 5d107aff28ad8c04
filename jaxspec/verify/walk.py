"""Walks the accepted path of a tree, and cuts verdicts at stops and limits."""

import jax.numpy as jnp

from jaxspec.protocol import Proposal, Sampling, Verdict
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from jaxspec.topology import Topology


def usable(proposal: Proposal, sampling: Sampling, topology: Topology) -> Array:
    """Draft nodes that may be accepted at all: real proposals within the row's own speculation length, [B, N]."""
    depth_N = jnp.asarray(topology.depth[1:], jnp.int32)
    return proposal.valid_BN & (depth_N[None] <= sampling.draft_limit_B[:, None])


def follow(target_BT: Array, token_BN: Array, usable_BN: Array, topology: Topology) -> Verdict:
    """Accepts every node that equals the target's own token at its parent, from the root on.

    Args:
      target_BT: the token that the target samples behind each node.
      token_BN: drafted tokens.
      usable_BN: nodes that may be accepted.
      topology: parents.
    """
    rows = target_BT.shape[0]
    accepted = [jnp.ones(rows, bool)]
    for node in range(1, topology.nodes):
        parent = topology.parents[node]
        hit = accepted[parent] & usable_BN[:, node - 1] & (token_BN[:, node - 1] == target_BT[:, parent])
        for sibling in topology.children[parent]:
            if sibling < node:
                hit &= ~accepted[sibling]  # equal siblings: the first one stands for all
        accepted.append(hit)
    path = [jnp.zeros(rows, jnp.int32) for _ in range(topology.max_depth + 1)]
    for node in range(1, topology.nodes):
        depth = topology.depth[node]
        path[depth] = jnp.where(accepted[node], node, path[depth])
    path_BK = jnp.stack(path, axis=1)
    count_B = jnp.stack(accepted, axis=1).sum(axis=1, dtype=jnp.int32)
    return Verdict(path_BK, jnp.take_along_axis(target_BT, path_BK, axis=1), count_B)


def stop_at(verdict: Verdict, sampling: Sampling, length_B: Array, active_B: Array) -> tuple[Verdict, Array, Array]:
    """Cuts a verdict behind the first stop id and at the row's longest length; idle rows commit nothing.

    Args:
      verdict: tokens that the rule accepts.
      sampling: stop ids and limits.
      length_B: position of the anchor.
      active_B: rows in use.

    Returns:
      The cut verdict, whether each row met a stop id, and whether it met its length limit.
    """
    depth_K = jnp.arange(verdict.token_BT.shape[1], dtype=jnp.int32)
    room_B = sampling.max_length_B - length_B - 1
    count_B = jnp.minimum(verdict.count_B, room_B)
    is_stop = jnp.any(verdict.token_BT[..., None] == sampling.stop_BX[:, None], axis=-1)
    is_stop &= depth_K[None] < count_B[:, None]
    first_B = jnp.argmax(is_stop, axis=1).astype(jnp.int32)
    stopped_B = jnp.any(is_stop, axis=1) & active_B
    count_B = jnp.where(stopped_B, first_B + 1, count_B)
    count_B = jnp.where(active_B, count_B, 0)
    full_B = active_B & ~stopped_B & (count_B >= room_B)
    return replace(verdict, count_B=count_B), stopped_B, full_B
