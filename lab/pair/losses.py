"""Training losses of language models and draft models."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.nn.router import Routing
from jaxspec.shapes import Array


def cross_entropy(logits_BTV: Array, target_BT: Array) -> Array:
    """Computes the mean negative log-likelihood in nats per token."""
    at_target = jnp.take_along_axis(logits_BTV, target_BT[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - at_target)


def distillation(logits_BTV: Array, teacher_BTV: Array) -> Array:
    """Computes the mean Kullback-Leibler divergence KL(teacher || student) in nats per token (Hinton 2015)."""
    logq = jax.nn.log_softmax(logits_BTV, axis=-1)
    logp = jax.nn.log_softmax(teacher_BTV, axis=-1)
    return jnp.mean(jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1))


def load_balance(routing: Sequence[Routing]) -> Array:
    """Computes the mean over layers of E * sum_e(share of choices * mean probability); 1 when balanced (Fedus 2021)."""
    total = jnp.float32(0)
    for layer in routing:
        experts = layer.logits_ME.shape[1]
        share_E = jnp.mean(jax.nn.one_hot(layer.expert_MA, experts), axis=(0, 1))
        total += experts * jnp.sum(share_E * jnp.mean(jax.nn.softmax(layer.logits_ME, axis=-1), axis=0))
    return total / max(len(routing), 1)


def router_z(routing: Sequence[Routing]) -> Array:
    """Computes the mean squared log-partition of the router logits, which keeps them small (Zoph 2022)."""
    total = jnp.float32(0)
    for layer in routing:
        total += jnp.mean(jax.nn.logsumexp(layer.logits_ME, axis=-1) ** 2)
    return total / max(len(routing), 1)
