"""What training minimizes: next tokens, closeness to the dense model on chats, and equal use of experts."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from lab.upcycle.network import Array, Kernel, Sizes, Tree, lower, upper_dense, upper_routed

CHUNK = 8192
ROLE = 1
"""The token that begins a turn: nobody has to foresee it, and it follows answers that were cut off."""


@dataclass(frozen=True)
class Weights:
    """Weights of the terms: next token and divergence on chats, and balance; elsewhere next tokens count once."""

    chat_next: float = 0.5
    chat_divergence: float = 1.0
    balance: float = 0.01


def cross_entropy(hidden_MD: Array, label_M: Array, embed_VD: Array) -> Array:
    """Returns the mean of the next tokens' negative log-probabilities, logits of one chunk at a time in memory."""

    @jax.checkpoint
    def chunk(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        hidden, label = part
        logits = jnp.einsum("md,vd->mv", hidden, embed_VD, preferred_element_type=jnp.float32)
        at_label = jnp.take_along_axis(logits, label[:, None], 1)[:, 0]
        return total + jnp.sum(jnp.where(label != ROLE, jax.nn.logsumexp(logits, 1) - at_label, 0.0)), None

    return lax.scan(chunk, jnp.float32(0), _chunks(hidden_MD, label_M))[0] / jnp.sum(label_M != ROLE, dtype=jnp.float32)


def divergence(hidden_MD: Array, wanted_MD: Array, embed_VD: Array) -> Array:
    """Returns the mean of Kullback-Leibler divergences from the wanted distributions."""

    @jax.checkpoint
    def chunk(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        log = [
            jax.nn.log_softmax(jnp.einsum("md,vd->mv", hidden, embed_VD, preferred_element_type=jnp.float32))
            for hidden in part
        ]
        return total + jnp.sum(jnp.exp(log[1]) * (log[1] - log[0])), None

    return lax.scan(chunk, jnp.float32(0), _chunks(hidden_MD, lax.stop_gradient(wanted_MD)))[0] / len(hidden_MD)


def _chunks(*arrays: Array) -> tuple[Array, ...]:
    size = next(n for n in range(min(CHUNK, len(arrays[0])), 0, -1) if len(arrays[0]) % n == 0)
    return tuple(x.reshape(-1, size, *x.shape[1:]) for x in arrays)


def objective(
    experts: Tree, frozen: Tree, row_BT: Array, sizes: Sizes, kernel: Kernel, chats: int, weights: Weights
) -> tuple[Array, Tree]:
    """Returns what is minimized, and figures.

    Args:
      experts: what is trained.
      frozen: the rest.
      row_BT: token rows, the last ``chats`` of which are chats.
      sizes: of the network.
      kernel: of attention.
      chats: rows of chats.
      weights: of the terms.
    """
    token_BT, label_BT = row_BT[:, :-1], row_BT[:, 1:]
    x_BTD = lower(frozen, token_BT, sizes, kernel)
    hidden_BTD, seen = upper_routed(frozen, experts, x_BTD, sizes, kernel)
    wanted_BTD = upper_dense(frozen, x_BTD[-chats:], sizes, kernel)
    text = cross_entropy(_flat(hidden_BTD[:-chats]), _flat(label_BT[:-chats]), frozen["embed"])
    chat = cross_entropy(_flat(hidden_BTD[-chats:]), _flat(label_BT[-chats:]), frozen["embed"])
    apart = divergence(_flat(hidden_BTD[-chats:]), _flat(wanted_BTD), frozen["embed"])
    balance = sizes.experts / sizes.top_k * jnp.mean(jnp.sum(seen["used_E"] * seen["score_E"], -1))
    share = chats / len(row_BT)
    total = (1 - share) * text + share * (weights.chat_next * chat + weights.chat_divergence * apart)
    idlest = jnp.min(seen["used_E"]) * sizes.experts / sizes.top_k
    figures = {"text": text, "chat": chat, "divergence": apart, "balance": balance, "idlest": idlest}
    return total + weights.balance * balance, figures


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])
