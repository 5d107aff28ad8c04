"""Exponentials and sums of kernel bodies, which round alike in every program also where XLA:CPU interprets them."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Implementation


def exp(x: jax.Array, implementation: Implementation) -> jax.Array:
    """Exponential of float32 that is not positive, to 8e-8 where it is interpreted.

    XLA:CPU's own has two roundings, and it depends on the program which element gets which; the one here is Cephes'
    reduction and polynomial (Moshier 1989). A GPU has one instruction for all.
    """
    if implementation == "triton":
        return jnp.exp(x)
    x = jnp.maximum(x, -87.0)
    power = jnp.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - power * 0.693359375) - power * -2.12194440e-4  # the first is exact: the constant has 9 bits
    tail = jnp.full_like(rest, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        tail = tail * rest + factor
    scale = lax.bitcast_convert_type((power.astype(jnp.int32) + 127) << 23, jnp.float32)
    return (tail * (rest * rest) + rest + 1.0) * scale


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
