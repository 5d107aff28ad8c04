"""Routing in plain JAX."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def route(
    part_SXE: jax.Array, biases: Mapping[str, jax.Array], scoring: Any, *, layer: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choices, weights and logits, as of ``api.route``."""
    own = {name: (bias if layer is None else bias[layer]).astype(jnp.float32) for name, bias in biases.items()}
    parts = part_SXE.shape[0] * (3 if scoring.thirds else 1)
    logits_ME = jnp.sum(part_SXE.reshape(parts, -1, part_SXE.shape[-1]), axis=0)
    logits_ME = logits_ME + own["logit"] if "logit" in own else logits_ME
    if scoring.kind == "softmax" and "choice" not in own and scoring.groups == 1:
        top_MA, expert_MA = jax.lax.top_k(logits_ME, scoring.top_k)
        return expert_MA.astype(jnp.int32), jax.nn.softmax(top_MA, axis=-1) * scoring.scale, logits_ME
    score_ME = jax.nn.sigmoid(logits_ME) if scoring.kind == "sigmoid" else logits_ME
    wanted_ME = _within_best_groups(score_ME + own["choice"] if "choice" in own else score_ME, scoring)
    _, expert_MA = jax.lax.top_k(wanted_ME, scoring.top_k)
    weight_MA = jnp.take_along_axis(score_ME, expert_MA, axis=-1)
    if scoring.kind == "softmax":
        weight_MA = jax.nn.softmax(weight_MA, axis=-1)
    elif scoring.renormalize:
        weight_MA = weight_MA / (jnp.sum(weight_MA, axis=-1, keepdims=True) + scoring.floor)
    return expert_MA.astype(jnp.int32), weight_MA * scoring.scale, logits_ME


def _within_best_groups(wanted_ME: jax.Array, scoring: Any) -> jax.Array:
    """Hides the experts outside of the groups whose best members score highest together."""
    if scoring.groups == 1:
        return wanted_ME
    wanted_MXE = wanted_ME.reshape(len(wanted_ME), scoring.groups, -1)
    best_MXN, _ = jax.lax.top_k(wanted_MXE, scoring.members)
    _, kept_MX = jax.lax.top_k(jnp.sum(best_MXN, axis=-1), scoring.kept_groups)
    is_kept_MX = jnp.any(jnp.arange(scoring.groups)[None, :, None] == kept_MX[:, None], axis=-1)
    return jnp.where(is_kept_MX[..., None], wanted_MXE, -jnp.inf).reshape(wanted_ME.shape)
