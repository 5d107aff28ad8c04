"""Root-mean-square normalisation with statistics in float32."""

import jax.numpy as jnp
from jax import lax

from jaxspec.nn.steady import row_sum
from jaxspec.shapes import Array


def rms_norm(x: Array, weight_D: Array, eps: float) -> Array:
    """Scales the last axis to unit root mean square, then by a learned weight.

    Args:
      x: [..., D] of any float dtype.
      weight_D: learned scale.
      eps: added to the mean square.

    Returns:
      float32 array of x's shape.
    """
    x = x.astype(jnp.float32)
    inv = lax.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
    return x * inv * weight_D.astype(jnp.float32)
