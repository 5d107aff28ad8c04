"""Sums and exponentials whose rounding never depends on how many rows are computed together."""

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.shapes import Array
from pallas_kernels import steady as kernels


@jax.custom_jvp
def row_sum(x: Array) -> Array:
    """Sum over the last axis, kept as one column, by halving it.

    XLA:CPU adds in another order once a reduction has some 4,096 elements, so that the same row sums differently
    among 5 rows than alone; verification would then not see the logits of plain decoding.

    Args:
      x: [..., N] floats.

    Returns:
      [..., 1].
    """
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        left, right = (lax.slice_in_dim(x, first, end, axis=-1) for first, end in ((0, half), (half, x.shape[-1])))
        if x.shape[-1] % 2:
            right = lax.pad(right, np.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(0, 1, 0)])
        x = lax.add(left, right)
    return x


@row_sum.defjvp
def _row_sum_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return row_sum(*primals), jnp.sum(tangents[0], axis=-1, keepdims=True)


def added_products(pairs: Iterable[tuple[Array, Array]]) -> Array:
    """Sum of products of float32 arrays in their order, to about 2e-7 of the largest.

    A compiler may round a product before it is added or not, and it depends on the shape what it does. So factors are
    cut into halves of 12 bits, whose products are exact; that of the two lower halves is left out.
    """
    return _added_products(tuple(pairs))


@jax.custom_jvp
def _added_products(pairs: tuple[tuple[Array, Array], ...]) -> Array:
    parts = []
    for a, b in pairs:
        (high_a, low_a), (high_b, low_b) = _halves(a), _halves(b)
        parts += [high_a * high_b, high_a * low_b, low_a * high_b]
    return functools.reduce(operator.add, parts)


@_added_products.defjvp
def _added_products_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    each = zip(primals[0], tangents[0], strict=True)
    return _added_products(*primals), functools.reduce(operator.add, (a * db + da * b for (a, b), (da, db) in each))


@jax.custom_jvp
def rounded(x: Array, zero: Array) -> Array:
    """Returns float32 x, a product, so that no compiler adds it before it was rounded; see the kernels' ``rounded``.

    A fused multiply-add would not round a product, and it depends on the program whether there is one.
    """
    return kernels.rounded(x, zero)


@rounded.defjvp
def _rounded_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return rounded(*primals), tangents[0]


def row_dot(a: Array, b: Array) -> Array:
    """Sum of the products of the last axes, kept as one column; as ``added_products``, but added like ``row_sum``.

    Derivatives are good to 12 bits.
    """
    (high_a, low_a), (high_b, low_b) = _halves(a), _halves(b)
    return row_sum(high_a * high_b) + (row_sum(high_a * low_b) + row_sum(low_a * high_b))


def _halves(x: Array) -> tuple[Array, Array]:
    bits = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high


@jax.custom_jvp
def exp(x: Array) -> Array:
    """Exponential of float32 to 8e-8, the same in every program; see ``polynomial_exp``."""
    return kernels.polynomial_exp(x)


@exp.defjvp
def _exp_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    value = exp(*primals)
    return value, value * tangents[0]


def sigmoid(x: Array) -> Array:
    """Logistic function."""
    return 1 / (1 + exp(-x))


def tanh(x: Array) -> Array:
    """Hyperbolic tangent, to 1e-7."""
    e = exp(-2 * jnp.abs(x))
    return jnp.where(x < 0, e - 1, 1 - e) / (1 + e)


def silu(x: Array) -> Array:
    """``x * sigmoid(x)`` (Elfwing 2017)."""
    return x / (1 + exp(-x))


def softplus(x: Array) -> Array:
    """``log(1 + exp(x))``, to float32's relative precision also where it is tiny.

    ``log(1 + u)`` is the series of ``2 atanh(u / (2 + u))``, of whose odd powers of at most 1/3 nine are enough.
    """
    u = exp(-jnp.abs(x))
    s = u / (2 + u)
    tail = jnp.full_like(s, 1 / 17)
    for odd in range(15, 0, -2):
        tail = tail * (s * s) + np.float32(1 / odd)
    return jnp.where(x >= 0, x, 0) + 2 * s * tail  # not a maximum: its derivative at 0 would be another


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    weight = exp(x - lax.stop_gradient(row_max(x)))
    return weight / row_sum(weight)


BLOCK = 64


def row_argmax(x: Array) -> Array:
    """Index of the first maximum along the last axis, int32.

    XLA:CPU looks for it number by number: ten times slower than blocks' maxima, of which and in which it then looks.
    """
    if x.shape[-1] % BLOCK:  # padding would move numbers between the devices of a split axis
        return _argmax(x)
    return lax.platform_dependent(x, cpu=_argmax_of_blocks, default=_argmax)


def _argmax(x: Array) -> Array:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _argmax_of_blocks(x: Array) -> Array:
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    block = _argmax(jnp.max(blocks, axis=-1))
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return block * BLOCK + _argmax(inside)


def row_top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The ``k`` largest along the last axis, in descending order, and their indices, int32.

    XLA:CPU sorts whole rows where parts of ``lax.top_k``'s result are read, as by slices, for which DFlash2's drafts
    took 24 times as long. The barrier keeps such parts away from it.
    """
    best, index = lax.optimization_barrier(lax.top_k(x, k))
    return best, index.astype(jnp.int32)


def row_max(x: Array) -> Array:
    """Maximum over the last axis, kept, by halving: XLA:GPU compiles its own beside ``row_sum`` for half a minute."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        ends = (0, half), (x.shape[-1] - half, x.shape[-1])
        x = lax.max(*(lax.slice_in_dim(x, first, end, axis=-1) for first, end in ends))
    return x
