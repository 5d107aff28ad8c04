"""Routed experts in plain JAX: every expert computes every row, and the choices say what counts."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import Quantized, Weight, widen


def routed_experts(
    x_MD: jax.Array,
    expert_MA: jax.Array,
    weight_MA: jax.Array,
    weights: Mapping[str, Weight],
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    dtype: jnp.dtype,
    layer: jax.Array | None = None,
) -> jax.Array:
    """As ``api.routed_experts``; an expert at a time, so that one expert's widened weights are in memory."""
    own = {name: w if layer is None else _entry(w, layer) for name, w in weights.items()}
    x = x_MD.astype(dtype)

    def add(total_MAD: jax.Array, e: jax.Array) -> tuple[jax.Array, None]:
        one = {name: _entry(w, e) for name, w in own.items()}
        both = _dot(x, one["gate_up_ED2F"])
        if "gate_up_bias_E2F" in one:
            both = both + widen(one["gate_up_bias_E2F"])
        y_MD = _dot(activation(both[:, 0], both[:, 1]).astype(dtype), one["down_EFD"])
        if "down_bias_ED" in one:
            y_MD = y_MD + widen(one["down_bias_ED"])
        return jnp.where((expert_MA == e)[..., None], y_MD[:, None], total_MAD), None

    rows, top_k = expert_MA.shape
    experts = own["down_EFD"].shape[0]
    zeros = jnp.zeros((rows, top_k, own["down_EFD"].shape[-1]), jnp.float32)
    y_MAD, _ = lax.scan(add, zeros, jnp.arange(experts, dtype=jnp.int32))
    return jnp.sum(y_MAD * weight_MA.astype(jnp.float32)[..., None], axis=1)


def _entry(w: Weight, place: jax.Array) -> Weight:
    return jax.tree.map(lambda leaf: leaf[place], w)


def _dot(x: jax.Array, w: Weight) -> jax.Array:
    """Plain weights are rounded to the dtype of x; numbers with scales are not rounded at all, as in the kernel."""
    if isinstance(w, Quantized) or x.dtype == jnp.float32:
        precision, x, wide = lax.Precision.HIGHEST, x.astype(jnp.float32), widen(w)
    else:
        precision, wide = None, w.astype(x.dtype)
    numbers = (((1,), (0,)), ((), ()))
    return lax.dot_general(x, wide, numbers, precision=precision, preferred_element_type=jnp.float32)
