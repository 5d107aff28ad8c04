"""Gated feed-forward layers and their activations."""

import jax
import jax.numpy as jnp

from jaxspec.nn.dense import dense
from jaxspec.shapes import Array

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def gated(
    x: Array, gate_up_D2F: Array, down_FD: Array, *, activation: str = "silu", dtype: jnp.dtype | None = None
) -> Array:
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020), gate and up in one product.

    Args:
      x: [..., D].
      gate_up_D2F: gate weights, then up weights.
      down_FD: projection back to the model width.
      activation: a key of ``ACTIVATIONS``.
      dtype: compute dtype of the products; the weights' own by default.
    """
    both = dense(x, gate_up_D2F, dtype=dtype)
    return dense(ACTIVATIONS[activation](both[..., 0, :]) * both[..., 1, :], down_FD, dtype=dtype)
