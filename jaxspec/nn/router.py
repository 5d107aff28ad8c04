"""Which experts a token goes to, and with what weights."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.nn.steady import exp, row_sum, sigmoid, softmax, softplus, tanh
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

ARGMAX_UP_TO = 4


@dataclass(frozen=True)
class RouterSpec:
    """How router logits become expert choices.

    Attributes:
      kind: ``softmax`` takes the top-k of the softmax; ``topk_softmax`` the softmax of the top-k logits; ``sigmoid``
        and ``sqrt_softplus`` score each expert by itself; ``sparse_mixer`` takes the two best one after the other, each
        weighed by the softmax of the logits that come close to it (Liu 2024); ``hash`` takes the experts that a table
        names for the token and weighs them by ``sqrt_softplus``.
      renormalize: whether the chosen weights are divided by their sum (not ``topk_softmax`` and ``sparse_mixer``).
      scale: multiplies the weights.
      logit_bias: whether a bias is added to the logits.
      choice_bias: whether a bias is added to the scores for choosing, but not for weighing.
      groups, kept_groups: experts lie in equal groups, of which those with the best members are kept.
      members: how many members of a group are summed for that.
      exact: whether the logits are computed to float32's precision whatever the compute dtype.
      floor: added to the sum that weights are divided by.
      jitter: of ``sparse_mixer``: twice that is the distance, as a share of the larger magnitude, up to which a logit
        comes close.
      soft_cap: c where logits x are ``c tanh(x / c)`` before anything else, 0 where they are not capped.
    """

    kind: Literal["softmax", "topk_softmax", "sigmoid", "sqrt_softplus", "sparse_mixer", "hash"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    logit_bias: bool = False
    choice_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    members: int = 2
    exact: bool = False
    floor: float = 1e-20
    jitter: float = 0.0
    soft_cap: float = 0.0


@pytree
class Routing:
    """Choices of M rows.

    Attributes:
      expert_MA: int32 ids, best first.
      weight_MA: float32 combine weights.
      logits_ME: float32 router logits, capped where they are.
      shared_MD: what the layer's shared experts return, or where it has none what its router reads; known before any
        row is dispatched.
    """

    expert_MA: Array
    weight_MA: Array
    logits_ME: Array
    shared_MD: Array | None = None


def route(
    logits_ME: Array, top_k: int, spec: RouterSpec, bias_E: Array | None = None, chosen_MA: Array | None = None
) -> Routing:
    """Chooses ``top_k`` experts per row; ties go to the lower expert id.

    Args:
      logits_ME: router logits.
      top_k: A.
      spec: how.
      bias_E: added to the scores for choosing (DeepSeek-V3, section 2.1.2).
      chosen_MA: the table's choices, for ``hash``.
    """
    if spec.soft_cap:
        logits_ME = spec.soft_cap * tanh(logits_ME / spec.soft_cap)
    of_the_best = spec.kind == "softmax" and spec.renormalize and bias_E is None and spec.groups == 1
    if spec.kind == "topk_softmax" or of_the_best:
        # Renormalized, the softmax of all experts is that of the chosen ones: a sum over A instead of over E.
        top, expert_MA = top_entries(logits_ME, top_k)
        return Routing(expert_MA, softmax(top) * spec.scale, logits_ME)
    if spec.kind == "sparse_mixer":
        return _sparse_mixer(logits_ME, spec)
    score_ME = SCORES[spec.kind](logits_ME)
    if chosen_MA is None:
        # A score of many experts may be rounded to 1, their logits stay in order.
        wanted_ME = logits_ME if spec.kind == "sigmoid" and spec.groups == 1 else score_ME
        wanted_ME = wanted_ME if bias_E is None else score_ME + bias_E.astype(jnp.float32)
        if spec.groups > 1:
            wanted_ME = _within_best_groups(wanted_ME, spec)
        _, chosen_MA = top_entries(wanted_ME, top_k)
    weight_MA = jnp.take_along_axis(score_ME, chosen_MA, axis=-1)
    if spec.renormalize:
        weight_MA = weight_MA / (row_sum(weight_MA) + np.float32(spec.floor))
    return Routing(chosen_MA, weight_MA * spec.scale, logits_ME)


def _sparse_mixer(logits_ME: Array, spec: RouterSpec) -> Routing:
    """Chooses the best expert, and then the best of the others; each has a softmax of its own."""
    best_M2, expert_M2 = top_entries(logits_ME, 2)
    weights, rivals_ME = [], logits_ME
    for n in range(2):
        best = best_M2[:, n : n + 1]
        close = (best - logits_ME) / jnp.maximum(jnp.abs(logits_ME), best) <= 2 * spec.jitter
        share = jnp.where(close, exp(rivals_ME - best), 0)
        weights.append(1 / row_sum(share))
        rivals_ME = jnp.where(jnp.arange(logits_ME.shape[-1]) == expert_M2[:, :1], -jnp.inf, logits_ME)
    return Routing(expert_M2, jnp.concatenate(weights, axis=-1) * spec.scale, logits_ME)


def _within_best_groups(score_ME: Array, spec: RouterSpec) -> Array:
    """Hides the experts outside of the groups whose best members score highest together."""
    rows, experts = score_ME.shape
    score_MXE = score_ME.reshape(rows, spec.groups, experts // spec.groups)
    best_MXN, _ = top_entries(score_MXE, spec.members)
    _, kept_MX = top_entries(row_sum(best_MXN)[..., 0], spec.kept_groups)
    is_kept = jnp.any(jnp.arange(spec.groups)[None, :, None] == kept_MX[:, None], axis=-1)
    return jnp.where(is_kept[..., None], score_MXE, -jnp.inf).reshape(rows, experts)


def _sqrt_softplus(x: Array) -> Array:
    return jnp.sqrt(softplus(x))


SCORES = {"softmax": softmax, "sigmoid": sigmoid, "sqrt_softplus": _sqrt_softplus, "hash": _sqrt_softplus}


def top_entries(score_ME: Array, top_k: int) -> tuple[Array, Array]:
    """Returns the ``top_k`` largest entries and their indices; few maxima are cheaper than ``lax.top_k``'s sort."""
    if top_k > ARGMAX_UP_TO:
        top, expert = lax.top_k(score_ME, top_k)
        return top, expert.astype(jnp.int32)
    scores, experts, left = [], [], score_ME
    for _ in range(top_k):
        expert = jnp.argmax(left, axis=-1, keepdims=True)
        scores.append(jnp.take_along_axis(score_ME, expert, axis=-1))
        experts.append(expert)
        left = jnp.where(jnp.arange(left.shape[-1]) == expert, -jnp.inf, left)
    return jnp.concatenate(scores, -1), jnp.concatenate(experts, -1).astype(jnp.int32)
