"""Exponentials and sums of kernel bodies, which round alike in every program also where XLA:CPU interprets them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation

FUSES_SOME = jax.__version_info__ >= (0, 12)  # whether XLA:CPU adds some products unrounded, instead of all


def exp(x: jax.Array, implementation: Implementation) -> jax.Array:
    """Exponential of float32: where it is interpreted, the same in every program; a GPU has one instruction for all."""
    return jnp.exp(x) if implementation == "triton" else polynomial_exp(x)


@partial(jax.jit, inline=True)
def polynomial_exp(x: jax.Array) -> jax.Array:
    """Exponential of float32 to 8e-8, by Cephes' reduction and polynomial (Moshier 1989), of what kernels can do.

    XLA:CPU's own has two roundings, one for full vectors and one for what is left over, and it depends on the size
    of the array which element gets which.

    It stands in every program many times, so it is traced once per shape, and in ``lax``, a third of ``jnp``'s time.
    """

    def constant(value: float, dtype: Any = np.float32) -> jax.Array:
        return lax.full_like(x, value, dtype)

    x = lax.min(lax.max(x, constant(-87.0)), constant(88.0))
    # The nearest whole number, without a sum that might be fused with the product.
    twice = lax.convert_element_type(lax.mul(x, constant(2 * 1.4426950408889634)), np.int32)
    zero, one = constant(0, np.int32), constant(1, np.int32)
    whole = lax.shift_right_arithmetic(lax.add(twice, lax.select(lax.lt(twice, zero), zero, one)), one)
    biased = lax.add(whole, constant(127, np.int32))  # 1 to 254
    unknown_zero = lax.shift_right_logical(biased, constant(8, np.int32))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return rounded(lax.mul(a, b), unknown_zero) if FUSES_SOME else lax.mul(a, b)

    power = lax.convert_element_type(whole, np.float32)
    rest = lax.sub(x, lax.mul(power, constant(0.693359375)))  # exact: the constant has 9 bits
    rest = lax.sub(rest, product(power, constant(-2.12194440e-4)))
    tail = constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        tail = lax.add(product(tail, rest), constant(factor))
    sum_of_all = lax.add(lax.add(product(tail, lax.mul(rest, rest)), rest), constant(1))
    bits = lax.shift_left(biased, constant(23, np.int32))
    return lax.mul(sum_of_all, lax.bitcast_convert_type(bits, np.float32))


def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns float32 x, a product, so that no compiler adds it to something before it was rounded.

    Args:
      x: the product.
      zero: int32 that is 0, and of which the compiler does not know that; broadcast against x.
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.int32) ^ zero, np.float32)


def total(x: jax.Array, axis: int, implementation: Implementation) -> jax.Array:
    """Sum along an axis of a power of two; by halving it where it is interpreted.

    XLA:CPU adds in an order that depends on the program around the sum; a GPU in that of the layout, which is part of
    the kernel.
    """
    if implementation == "triton":
        return jnp.sum(x, axis=axis)
    while x.shape[axis] > 1:
        left, right = jnp.split(x, 2, axis)
        x = left + right
    return jnp.squeeze(x, axis)
