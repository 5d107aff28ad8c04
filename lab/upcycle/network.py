"""The dense decoder whose upper layers get routed experts, as plain functions of arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Tree = Mapping[str, Any]
Kernel = Literal["cudnn", "xla"]


@dataclass(frozen=True)
class Sizes:
    """Numbers of the network.

    Attributes:
      layers: in all; those from ``first`` on have routed experts.
      dim, heads, kv_heads, head_dim, hidden, vocab: of the dense decoder.
      theta, eps: of rotary positions and norms.
      first: first layer with experts.
      experts, top_k, width: E, A and F of the routed experts.
    """

    layers: int = 30
    dim: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    hidden: int = 1536
    vocab: int = 49152
    theta: float = 100000.0
    eps: float = 1e-5
    first: int = 17
    experts: int = 16
    top_k: int = 4
    width: int = 64

    @property
    def upper(self) -> int:
        """Layers with experts."""
        return self.layers - self.first


SMOLLM2 = Sizes()
TINY = Sizes(layers=4, dim=32, heads=4, kv_heads=2, head_dim=8, hidden=48, vocab=256, first=2, width=8)


def norm(x: Array, weight_D: Array, eps: float) -> Array:
    """Normalizes by the root mean square, in float32."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight_D.astype(x.dtype)


def rotate(x_BTHC: Array, position_BT: Array, theta: float) -> Array:
    """Turns halves of every head by its position."""
    half = x_BTHC.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position_BT[..., None, None].astype(jnp.float32) * frequency
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)


def project(layer: Tree, x_BTD: Array, position_BT: Array, sizes: Sizes) -> tuple[Array, Array, Array]:
    """Computes queries, keys and values of a normalized stream."""
    lead, c = x_BTD.shape[:-1], sizes.head_dim
    q = (x_BTD @ layer["q"]).reshape(*lead, sizes.heads, c)
    k = (x_BTD @ layer["k"]).reshape(*lead, sizes.kv_heads, c)
    v = (x_BTD @ layer["v"]).reshape(*lead, sizes.kv_heads, c)
    return rotate(q, position_BT, sizes.theta), rotate(k, position_BT, sizes.theta), v


def attend(layer: Tree, x_BTD: Array, sizes: Sizes, kernel: Kernel) -> Array:
    """Adds causal attention to the stream; ``kernel`` is an implementation of ``jax.nn.dot_product_attention``."""
    position_BT = jnp.arange(x_BTD.shape[1])[None]
    q, k, v = project(layer, norm(x_BTD, layer["norm1"], sizes.eps), position_BT, sizes)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
    return x_BTD + mixed.reshape(*x_BTD.shape[:-1], -1) @ layer["o"]


def dense_ffn(layer: Tree, x_BTD: Array) -> Array:
    """The feed-forward of a normalized stream."""
    return (jax.nn.silu(x_BTD @ layer["gate"]) * (x_BTD @ layer["up"])) @ layer["down"]


def route(router_DE: Array, x_BTD: Array, top_k: int) -> tuple[Array, Array]:
    """Returns combine weights [B, T, E], zero for those not chosen, and all probabilities."""
    logits = jnp.einsum("btd,de->bte", x_BTD, router_DE.astype(x_BTD.dtype), preferred_element_type=jnp.float32)
    score = jax.nn.softmax(logits)
    fixed = lax.stop_gradient(score)
    rank = jnp.sum(fixed[..., None, :] > fixed[..., :, None], -1)  # how many experts come before
    chosen = jnp.where(rank < top_k, score, 0.0)
    return chosen / jnp.sum(chosen, -1, keepdims=True), score


def routed_ffn(experts: Tree, x_BTD: Array, top_k: int) -> tuple[Array, Tree]:
    """Computes all experts and masks those not chosen, with what the balance loss needs."""
    weight, score = route(experts["router"], x_BTD, top_k)
    gate_EDF, up_EDF, down_EFD = (experts[name].astype(x_BTD.dtype) for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x_BTD, gate_EDF)) * jnp.einsum("btd,edf->btef", x_BTD, up_EDF)
    out = jnp.einsum("btef,efd->btd", hidden * weight[..., None].astype(hidden.dtype), down_EFD)
    seen = {"used_E": weight > 0, "score_E": score, "mean_D": x_BTD}
    return out, {
        name: jnp.mean(lax.stop_gradient(y) if name != "score_E" else y, (0, 1), jnp.float32)
        for name, y in seen.items()
    }


def dense_layer(layer: Tree, x_BTD: Array, sizes: Sizes, kernel: Kernel) -> Array:
    """One layer of the dense decoder."""
    x_BTD = attend(layer, x_BTD, sizes, kernel)
    return x_BTD + dense_ffn(layer, norm(x_BTD, layer["norm2"], sizes.eps))


def expert_layer(layer: Tree, experts: Tree, x_BTD: Array, sizes: Sizes, kernel: Kernel) -> tuple[Array, Tree]:
    """The same layer with routed experts beside its feed-forward."""
    x_BTD = attend(layer, x_BTD, sizes, kernel)
    read = norm(x_BTD, layer["norm2"], sizes.eps)
    routed, seen = routed_ffn(experts, read, sizes.top_k)
    return x_BTD + (routed + dense_ffn(layer, read)), seen


def run_dense(stack: Tree, x_BTD: Array, sizes: Sizes, kernel: Kernel) -> Array:
    """Runs a stack of dense layers."""
    return lax.scan(lambda x, layer: (dense_layer(layer, x, sizes, kernel), None), x_BTD, stack)[0]


def lower(frozen: Tree, token_BT: Array, sizes: Sizes, kernel: Kernel) -> Array:
    """Runs the layers without experts, whose weights never change."""
    x_BTD = frozen["embed"][token_BT]
    return lax.stop_gradient(run_dense(frozen["lower"], x_BTD, sizes, kernel))


def upper_dense(frozen: Tree, x_BTD: Array, sizes: Sizes, kernel: Kernel) -> Array:
    """Runs the upper layers as the dense model has them; returns what the head reads."""
    return norm(run_dense(frozen["upper"], x_BTD, sizes, kernel), frozen["norm"], sizes.eps)


def upper_routed(frozen: Tree, experts: Tree, x_BTD: Array, sizes: Sizes, kernel: Kernel) -> tuple[Array, Tree]:
    """Runs the upper layers with experts; their products are kept for the backward pass, the rest is computed again."""
    layer = jax.checkpoint(
        partial(expert_layer, sizes=sizes, kernel=kernel),
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    )
    x_BTD, seen = lax.scan(lambda x, weights: layer(*weights, x), x_BTD, (frozen["upper"], experts))
    return norm(x_BTD, frozen["norm"], sizes.eps), seen
