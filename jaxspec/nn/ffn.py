"""Gated feed-forward layers and their activations."""

import jax
import jax.numpy as jnp

from jaxspec.nn.dense import dense
from jaxspec.nn.steady import silu
from jaxspec.shapes import Array

ACTIVATIONS = {"silu": silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def gated(
    x: Array,
    gate_up_D2F: Array,
    down_FD: Array,
    *,
    activation: str = "silu",
    dtype: jnp.dtype | None = None,
    scale: Array | None = None,
) -> Array:
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020), gate and up in one product.

    Args:
      x: [..., D].
      gate_up_D2F: gate weights, then up weights.
      down_FD: projection back to the model width.
      activation: a key of ``ACTIVATIONS``.
      dtype: compute dtype of the products; the weights' own by default.
      scale: [..., 1], multiplies the result; applied to the hidden units, so that no product meets the sum behind it.
    """
    both = dense(x, gate_up_D2F, dtype=dtype)
    hidden = ACTIVATIONS[activation](both[..., 0, :]) * both[..., 1, :]
    return dense(hidden if scale is None else hidden * scale, down_FD, dtype=dtype)
