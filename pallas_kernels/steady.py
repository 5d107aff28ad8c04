"""Exponentials and sums of kernel bodies, which round alike in every program also where XLA:CPU interprets them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation


def exp(x: jax.Array, implementation: Implementation) -> jax.Array:
    """Exponential of float32: where it is interpreted, the same in every program; a GPU has one instruction for all."""
    return jnp.exp(x) if implementation == "triton" else polynomial_exp(x)


def polynomial_exp(x: jax.Array) -> jax.Array:
    """Exponential of float32 to 8e-8, by Cephes' reduction and polynomial (Moshier 1989), of what kernels can do.

    XLA:CPU's own has two roundings, one for full vectors and one for what is left over, and it depends on the size
    of the array which element gets which.
    """
    x = jnp.clip(x, -87.0, 88.0)
    # The nearest whole number, without a sum that might be fused with the product.
    twice = (x * np.float32(2 * 1.4426950408889634)).astype(jnp.int32)
    whole = (twice + jnp.where(twice < 0, 0, 1)) >> 1
    power = whole.astype(jnp.float32)
    rest = x - power * np.float32(0.693359375)  # exact: the constant has 9 bits
    rest = rest - power * np.float32(-2.12194440e-4)
    tail = jnp.full_like(rest, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        tail = tail * rest + np.float32(factor)
    scale = lax.bitcast_convert_type((whole + 127) << 23, jnp.float32)
    return (tail * (rest * rest) + rest + np.float32(1)) * scale


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
