"""Normalization with statistics in float32: root mean square, and mean and variance."""

import jax.numpy as jnp
from jax import lax

from jaxspec.nn.steady import row_sum
from jaxspec.shapes import Array


def rms_norm(x: Array, weight_D: Array | None, eps: float, *, offset: float = 0.0) -> Array:
    """Scales the last axis to unit root mean square, then by a learned weight (Zhang 2019).

    Args:
      x: [..., D] of any float dtype.
      weight_D: learned scale, None for none.
      eps: added to the mean square.
      offset: added to the scale, which is then learned as its distance from that.

    Returns:
      float32 array of x's shape.
    """
    x = x.astype(jnp.float32)
    normed = x * lax.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
    return normed if weight_D is None else normed * (weight_D.astype(jnp.float32) + offset)


def layer_norm(x: Array, weight_D: Array, bias_D: Array, eps: float) -> Array:
    """Shifts the last axis to mean 0 and scales it to variance 1, then scales and shifts it as learned (Ba 2016).

    Args:
      x: [..., D] of any float dtype.
      weight_D: learned scale.
      bias_D: learned shift.
      eps: added to the variance.

    Returns:
      float32 array of x's shape.
    """
    x = x.astype(jnp.float32)
    x = x - row_sum(x) / x.shape[-1]
    normed = x * lax.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
    return normed * weight_D.astype(jnp.float32) + bias_D.astype(jnp.float32)
