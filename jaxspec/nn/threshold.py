"""The largest number at which those that are not smaller weigh enough together, found without a sort."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.native.product import kernels
from jaxspec.native.threshold_call import find_threshold as native_find
from jaxspec.shapes import Array

MOST = np.int32(2**31 - 1)


def find_threshold(x_BTV: Array, weight_BTV: Array, least_BT: Array) -> Array:
    """Returns the largest of each node's numbers at which those that are not smaller weigh ``least`` together.

    It is found by its bits: on a CPU by a kernel in C, without a compiler in 32 sums, on a GPU in 8 times 15 sums. A
    sort costs a CPU some twenty times as much, and a GPU a call that no graph holds.

    Args:
      x_BTV: float32 numbers.
      weight_BTV: int32, of each; 0 or more, below 2^31 together.
      least_BT: int32 of at least 1.

    Returns:
      [B, T]; not-a-number, than which nothing is smaller, where all numbers weigh less.
    """
    on_cpu = search_by_kernel if has_kernels() else search_one_by_one
    return lax.platform_dependent(x_BTV, weight_BTV, least_BT, cpu=on_cpu, default=search_four_bits_at_once)


def has_kernels() -> bool:
    """Whether a CPU computes, with kernels in C."""
    return jax.default_backend() == "cpu" and kernels().handle is not None


def search_by_kernel(x_BTV: Array, weight_BTV: Array, least_BT: Array) -> Array:
    """For CPUs with the kernels in C, which sort numbers into bins by 11 of their bits at a time."""
    nodes = (x.reshape(-1, *x.shape[2:]) for x in (x_BTV, weight_BTV, least_BT))
    return native_find(*nodes).reshape(least_BT.shape)


def search_one_by_one(x_BTV: Array, weight_BTV: Array, least_BT: Array) -> Array:
    """For other CPUs, which do the least work bit by bit; a node's numbers stay in a core's cache."""
    nodes = (x.reshape(-1, *x.shape[2:]) for x in (x_BTV, weight_BTV, least_BT))
    return lax.map(lambda node: _search(*node, bits=1, unroll=False), tuple(nodes)).reshape(least_BT.shape)


def search_four_bits_at_once(x_BTV: Array, weight_BTV: Array, least_BT: Array) -> Array:
    """For GPUs, where few launches are few microseconds, and a loop would tear the step's CUDA graph apart."""
    return _search(x_BTV, weight_BTV, least_BT, bits=4, unroll=True)


def _search(x_BTV: Array, weight_BTV: Array, least_BT: Array, *, bits: int, unroll: bool) -> Array:
    bits_BTV = lax.bitcast_convert_type(x_BTV, jnp.int32)
    order_BTV = jnp.where(bits_BTV < 0, bits_BTV ^ MOST, bits_BTV)  # integers in the order of the numbers
    digit_X = jnp.arange(1, 1 << bits, dtype=jnp.int32).reshape(-1, *[1] * least_BT.ndim)

    def more(n: Array, threshold_BT: Array) -> Array:
        shift = 32 - bits - bits * n
        tried_XBT = threshold_BT + (digit_X << shift)
        weighed = jnp.where(order_BTV >= tried_XBT[..., None], weight_BTV, 0)
        reaches_XBT = jnp.sum(weighed, axis=-1, dtype=jnp.int32) >= least_BT
        return threshold_BT + (jnp.sum(reaches_XBT, axis=0, dtype=jnp.int32) << shift)

    threshold_BT = lax.fori_loop(0, 32 // bits, more, jnp.full(least_BT.shape, -MOST - 1), unroll=unroll)
    return lax.bitcast_convert_type(jnp.where(threshold_BT < 0, threshold_BT ^ MOST, threshold_BT), jnp.float32)
