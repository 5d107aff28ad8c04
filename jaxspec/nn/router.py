"""Which experts a token goes to, and with what weights."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import lax

from jaxspec.nn.steady import row_sum, softmax
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

ARGMAX_UP_TO = 4


@dataclass(frozen=True)
class RouterSpec:
    """How router logits become expert choices.

    Attributes:
      kind: ``softmax`` takes the top-k of the softmax; ``topk_softmax`` takes the softmax of the top-k logits.
      renormalise: whether the chosen probabilities are divided by their sum (``softmax`` only).
    """

    kind: Literal["softmax", "topk_softmax"] = "softmax"
    renormalise: bool = True


@pytree
class Routing:
    """Choices of M rows.

    Attributes:
      expert_MA: int32 ids, best first.
      weight_MA: float32 combine weights.
      logits_ME: float32 router logits.
    """

    expert_MA: Array
    weight_MA: Array
    logits_ME: Array


def route(logits_ME: Array, top_k: int, spec: RouterSpec) -> Routing:
    """Chooses ``top_k`` experts per row; ties go to the lower expert id."""
    if spec.kind == "topk_softmax":
        top, expert_MA = best(logits_ME, top_k)
        return Routing(expert_MA, softmax(top), logits_ME)
    weight_MA, expert_MA = best(softmax(logits_ME), top_k)
    if spec.renormalise:
        weight_MA = weight_MA / row_sum(weight_MA)
    return Routing(expert_MA, weight_MA, logits_ME)


def best(score_ME: Array, top_k: int) -> tuple[Array, Array]:
    """The ``top_k`` largest entries and their places; a few maxima are cheaper than the sort behind ``lax.top_k``."""
    if top_k > ARGMAX_UP_TO:
        top, place = lax.top_k(score_ME, top_k)
        return top, place.astype(jnp.int32)
    found, places, left = [], [], score_ME
    for _ in range(top_k):
        place = jnp.argmax(left, axis=-1, keepdims=True)
        found.append(jnp.take_along_axis(score_ME, place, axis=-1))
        places.append(place)
        left = jnp.where(jnp.arange(left.shape[-1]) == place, -jnp.inf, left)
    return jnp.concatenate(found, -1), jnp.concatenate(places, -1).astype(jnp.int32)
