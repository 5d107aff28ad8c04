"""How evenly the routers of a head's own layers use their experts: the loss that spreads tokens, and figures."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.nn.router import Routing
from jaxspec.shapes import Array


class RoutedSlots(NamedTuple):
    """Slots of B rows that went through the experts of one layer.

    Attributes:
      routing: their choices, M = B * X rows.
      weight_BX: 1 for slots that count, else 0.
    """

    routing: Routing
    weight_BX: Array


def balance_loss(slots: Sequence[RoutedSlots], share_B: Array) -> tuple[Array, dict[str, Array]]:
    """Computes the loss that spreads tokens over experts, a scalar, and metrics.

    It is Switch's (Fedus 2021, 2101.03961, equation 4) for A choices, ``E sum_e f_e P_e`` with f_e the share of choices
    that are e and P_e the mean softmax: 1 where all experts are used alike, at most E. Each row has its own, as in
    DeepSeek-V3 (2412.19437, equation 17), so that it does not depend on which rows are computed together.

    Args:
      slots: of every layer with experts, and of every round.
      share_B: of each row in the mean over rows.

    Returns:
      The loss, and ``balance_loss`` and ``dead_experts``, the share of experts that nothing chose, mean over layers and
      rounds.
    """
    losses, dead = [], []
    for routing, weight_BX in slots:
        experts, top_k = routing.logits_ME.shape[-1], routing.expert_MA.shape[-1]
        chosen_BXE = jnp.sum(jax.nn.one_hot(routing.expert_MA, experts), axis=-2).reshape(*weight_BX.shape, experts)
        prob_BXE = jax.nn.softmax(routing.logits_ME, axis=-1).reshape(chosen_BXE.shape)
        count_B1 = jnp.maximum(jnp.sum(weight_BX, axis=1), 1.0)[:, None]
        times_BE = jnp.einsum("bx,bxe->be", weight_BX, chosen_BXE)
        prob_BE = jnp.einsum("bx,bxe->be", weight_BX, prob_BXE) / count_B1
        loss_B = experts / top_k * jnp.sum(times_BE / count_B1 * prob_BE, axis=-1)
        losses.append(jnp.sum(share_B * loss_B))
        dead.append(jnp.mean((jnp.sum(times_BE, axis=0) == 0).astype(jnp.float32)))
    loss = jnp.mean(jnp.stack(losses))
    return loss, {"balance_loss": loss, "dead_experts": jnp.mean(jnp.stack(dead))}
