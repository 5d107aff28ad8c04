"""Thresholds of rows of numbers, by weight and as sampling truncates: calls of the kernels."""

import jax
import jax.numpy as jnp

from jaxspec.native.product import kernels

Array = jax.Array
TARGET, CUT = "jaxspec_threshold", "jaxspec_cut"


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


def find_cut(score_NV: Array, floor_N: Array, top_k_N: Array, units_N: Array) -> Array:
    """Returns the score below which min-p, then top-k, then top-p leave tokens out, float32 [N].

    Args:
      score_NV: float32.
      floor_N: what the least score that min-p keeps is above the best, float32; -inf for no such limit.
      top_k_N: int32, 0 for no limit.
      units_N: top-p in units of 2^-30, int32; 0 for no limit.
    """
    kernels()
    result = jax.ShapeDtypeStruct(floor_N.shape, jnp.float32)
    return jax.ffi.ffi_call(CUT, result)(score_NV, floor_N, top_k_N, units_N)
