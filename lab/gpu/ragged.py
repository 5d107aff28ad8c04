"""Other ways to compute routed experts that the kernel is measured beside: ragged products by XLA and by tokamax."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Dot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Activation = Callable[[jax.Array, jax.Array], jax.Array]


def xla_dot(x_RK: jax.Array, w_EKN: jax.Array, size_E: jax.Array) -> jax.Array:
    """``jax.lax.ragged_dot`` with float32 sums."""
    return lax.ragged_dot(x_RK, w_EKN, size_E, preferred_element_type=jnp.float32)


def tokamax_dot() -> Dot:
    """``tokamax.ragged_dot`` with float32 sums.

    Raises:
      ImportError: tokamax is not installed.
    """
    tokamax: Any = import_module("tokamax")
    return lambda x, w, size: tokamax.ragged_dot(x, w, group_sizes=size, preferred_element_type=jnp.float32)


def by_ragged_dot(dot: Dot, activation: Activation) -> Callable[..., jax.Array]:
    """Routed experts of plain weights as two ragged products over rows that are sorted by expert.

    Args:
      dot: sorted rows [R, K], weights [E, K, N] and the rows of each expert to float32 [R, N].
      activation: hidden units of gate and up.

    Returns:
      Function of rows, choices, combine weights, ``gate_up_ED2F`` and ``down_EFD`` to float32 [M, D].
    """

    def run(x_MD: Any, expert_MA: Any, weight_MA: Any, gate_up_ED2F: Any, down_EFD: Any) -> jax.Array:
        experts, width, _, hidden = gate_up_ED2F.shape
        rows, top_k = expert_MA.shape
        flat_R = expert_MA.reshape(-1)
        order_R = jnp.argsort(flat_R)
        size_E = jnp.sum(flat_R[:, None] == jnp.arange(experts, dtype=flat_R.dtype), axis=0, dtype=jnp.int32)
        both = dot(x_MD[order_R // top_k], gate_up_ED2F.reshape(experts, width, 2 * hidden), size_E)
        inner = activation(both[:, :hidden], both[:, hidden:]).astype(x_MD.dtype)
        out_RD = dot(inner, down_EFD, size_E)[jnp.argsort(order_R)].astype(jnp.float32)
        return jnp.sum(out_RD.reshape(rows, top_k, width) * weight_MA[..., None], axis=1)

    return run
