"""Which experts a verification chose, for drafts that were accepted and rejected, and which had been predicted."""

import jax.numpy as jnp

from jaxspec.models.transformer import Hidden
from jaxspec.protocol import Proposal, Verdict
from jaxspec.pytree import pytree
from jaxspec.shapes import Array


@pytree
class Routes:
    """Choices in one step.

    Attributes:
      expert_BTYA: of the anchor and the drafts, in every expert layer.
      live_BT: positions that were computed.
      kept_BT: those of them that became text; the anchor is one always.
      turn_BT: token id plus position, see ``jaxspec.nn.expert_slots``.
      predicted_BKYA: what the drafter predicted for the drafts, None where it predicts none.
    """

    expert_BTYA: Array
    live_BT: Array
    kept_BT: Array
    turn_BT: Array
    predicted_BKYA: Array | None


def routes_of(
    hidden: Hidden, proposal: Proposal, verdict: Verdict, live_BT: Array, token_BT: Array, position_BT: Array
) -> Routes:
    """Takes the choices of a step apart; layers must choose equally many experts."""
    rows, width = token_BT.shape
    chosen = [routing.expert_MA.reshape(rows, width, -1) for routing in hidden.routing]
    node_T = jnp.arange(width, dtype=jnp.int32)
    counts_BJ = node_T[None, : verdict.path_BT.shape[1]] < verdict.count_B[:, None]
    kept_BT = jnp.any((verdict.path_BT[:, None] == node_T[None, :, None]) & counts_BJ[:, None], axis=2)
    return Routes(jnp.stack(chosen, axis=2), live_BT, kept_BT & live_BT, token_BT + position_BT, proposal.expert_BKYA)
