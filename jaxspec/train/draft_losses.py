"""Losses of draft heads: the distance of a predicted token's distribution from the target's, position by position."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.nn.steady import row_argmax
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

LK_RATE = 3.0


@pytree
class TargetPrediction:
    """The target's prediction, seen in the draft vocabulary.

    Attributes:
      logp_BXW: log of the target's distribution over the draft vocabulary, renormalized to it.
      logp_whole_BXW: the same, but as shares of the whole vocabulary.
      knows_BX: whether the target's most likely token is in the draft vocabulary.
      best_BX: index of its most likely token in the draft vocabulary.
    """

    logp_BXW: Array
    logp_whole_BXW: Array
    knows_BX: Array
    best_BX: Array


def target_prediction(logits_BTV: Array, ids_W: Array | None) -> TargetPrediction:
    """Restricts the target's prediction to the tokens ``ids_W`` that a head knows (None: all)."""
    whole = jax.nn.log_softmax(logits_BTV, axis=-1)
    if ids_W is None:
        return TargetPrediction(whole, whole, jnp.ones(whole.shape[:-1], bool), row_argmax(whole))
    some = jnp.take(whole, ids_W, axis=-1)
    knows = jnp.max(some, axis=-1) >= jnp.max(whole, axis=-1)
    return TargetPrediction(jax.nn.log_softmax(some, axis=-1), some, knows, row_argmax(some))


def _soft_ce(p: TargetPrediction, logq: Array) -> Array:
    return -jnp.sum(jnp.exp(p.logp_BXW) * logq, axis=-1)


def _kl(p: TargetPrediction, logq: Array) -> Array:
    return jnp.sum(jnp.exp(p.logp_BXW) * (p.logp_BXW - logq), axis=-1)


def _reverse_kl(p: TargetPrediction, logq: Array) -> Array:
    return jnp.sum(jnp.exp(logq) * (logq - p.logp_BXW), axis=-1)


def acceptance(p: TargetPrediction, logq: Array) -> Array:
    """Computes the probability that a draft drawn from q is accepted, the sum of min(p, q) (Leviathan 2023), [B, X]."""
    return jnp.sum(jnp.minimum(jnp.exp(p.logp_whole_BXW), jnp.exp(logq)), axis=-1)


def _tv(p: TargetPrediction, logq: Array) -> Array:
    return 1 - acceptance(p, logq)


def _lk_alpha(p: TargetPrediction, logq: Array) -> Array:
    return -jnp.log(jnp.maximum(acceptance(p, logq), 1e-6))


def _lk_hybrid(p: TargetPrediction, logq: Array) -> Array:
    rate = acceptance(p, logq)
    share = jnp.exp(-LK_RATE * jax.lax.stop_gradient(rate))
    return share * _kl(p, logq) + (1 - share) * (1 - rate)


# Soft cross-entropy, both directions of the Kullback-Leibler divergence, total variation, and those that aim at
# acceptance itself (2602.23881): its logarithm, and a mixture that leaves the divergence as acceptance grows.
DRAFT_LOSSES: dict[str, Callable[[TargetPrediction, Array], Array]] = {
    "soft_ce": _soft_ce, "kl": _kl, "reverse_kl": _reverse_kl, "tv": _tv, "lk_alpha": _lk_alpha,
    "lk_hybrid": _lk_hybrid,
}  # fmt: skip


def smooth_l1(predicted: Array, target: Array) -> Array:
    """Computes the Huber loss with threshold 1, mean over the last axis: EAGLE-1's regression of the next feature."""
    far = jnp.abs(predicted - target)
    return jnp.mean(jnp.where(far < 1, 0.5 * far * far, far - 0.5), axis=-1)


def routing_loss(logits_BXYE: Array, chosen_BXYA: Array) -> Array:
    """Computes the cross-entropy of each expert being chosen, mean over layers and experts, [B, X].

    The few chosen weigh as much as all others, (E - A) / A each: indifferent predictions have one mean for any E and A.
    """
    experts, chosen = logits_BXYE.shape[-1], chosen_BXYA.shape[-1]
    label = jnp.sum(jax.nn.one_hot(chosen_BXYA, experts, dtype=jnp.float32), axis=-2)
    weight = jnp.where(label > 0, (experts - chosen) / chosen, 1.0)
    losses = weight * (jax.nn.softplus(logits_BXYE) - label * logits_BXYE)
    return jnp.sum(losses, axis=(-1, -2)) / (2 * (experts - chosen) * logits_BXYE.shape[-2])


def recall(logits_BXYE: Array, chosen_BXYA: Array, k: int) -> Array:
    """Computes the share of the chosen experts among the k predicted most likely, mean over layers, [B, X]."""
    _, guess = jax.lax.top_k(logits_BXYE, k)
    hit = jnp.any(chosen_BXYA[..., :, None] == guess[..., None, :], axis=-1)
    return jnp.mean(hit.astype(jnp.float32), axis=(-1, -2))
