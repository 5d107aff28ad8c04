"""The threshold of a row of numbers, by weight: the call of the kernel."""

import jax
import jax.numpy as jnp

from jaxspec.native.product import kernels

Array = jax.Array
TARGET = "jaxspec_threshold"


def find_threshold(x_NV: Array, weight_NV: Array, least_N: Array) -> Array:
    """Returns the largest of each row's numbers at which those that are not smaller weigh ``least`` together.

    Args:
      x_NV: float32 numbers.
      weight_NV: int32, of each; 0 or more, below 2^31 together.
      least_N: int32 of at least 1.

    Returns:
      float32 [N]; not-a-number where all numbers of a row weigh less.
    """
    kernels()
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(least_N.shape, jnp.float32))(x_NV, weight_NV, least_N)
