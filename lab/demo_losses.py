"""Training losses of language models and draft models."""

import jax
import jax.numpy as jnp

from jaxspec.nn.router import Routing
from jaxspec.shapes import Array


def cross_entropy(logits_BTV: Array, target_BT: Array) -> Array:
    """Mean negative log-likelihood in nats per token."""
    logp = jax.nn.log_softmax(logits_BTV, axis=-1)
    return -jnp.mean(jnp.take_along_axis(logp, target_BT[..., None], axis=-1))


def distillation(logits_BTV: Array, teacher_BTV: Array) -> Array:
    """Mean Kullback-Leibler divergence KL(teacher || student) in nats per token (Hinton 2015, temperature 1)."""
    logq = jax.nn.log_softmax(logits_BTV, axis=-1)
    logp = jax.nn.log_softmax(teacher_BTV, axis=-1)
    return jnp.mean(jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1))


def load_balance(routing: tuple[Routing, ...]) -> Array:
    """Mean over layers of E * sum_e(share of choices * mean probability); 1 when balanced (Fedus 2021)."""
    total = jnp.float32(0)
    for layer in routing:
        experts = layer.logits_ME.shape[1]
        share_E = jnp.mean(jax.nn.one_hot(layer.expert_MA, experts).sum(1), axis=0) / layer.expert_MA.shape[1]
        total += experts * jnp.sum(share_E * jnp.mean(jax.nn.softmax(layer.logits_ME, axis=-1), axis=0))
    return total / max(len(routing), 1)


def router_z(routing: tuple[Routing, ...]) -> Array:
    """Mean squared log-partition of the router logits, which keeps them small (Zoph 2022)."""
    total = jnp.float32(0)
    for layer in routing:
        total += jnp.mean(jax.nn.logsumexp(layer.logits_ME, axis=-1) ** 2)
    return total / max(len(routing), 1)
