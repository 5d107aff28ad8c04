"""Weights for cases: shapes and random values of every form of storing them."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.quantized import Format, Quantized, Weight, abstract_quantized

Sizes = tuple[int, ...]


def format_of(form: str, shape: Sizes, block: int = 128) -> Format | None:
    """Storage of a weight [..., K, N] or [..., K, 2, N] is stored; ``shape`` is that of its last axes.

    Args:
      form: ``fp8`` has a float32 scale per square block, ``mxfp8`` a power of two; ``int8`` one per column; ``mxfp4``
        a power of two per 32 numbers along K; any other word is the dtype of a plain array.
      shape: K, maybe 2, and N.
      block: side of the squares.
    """
    middle = (1,) * (len(shape) - 2)
    if form in ("fp8", "mxfp8"):
        return Format("fp8", (block, *middle, block), exponent_scales=form == "mxfp8")
    if form == "int8":
        return Format("int8", (shape[0], *middle, 1))
    return Format("fp4", (32, *middle, 1), True, -len(shape)) if form == "mxfp4" else None


def abstract_weight(form: str, lead: Sizes, shape: Sizes, block: int = 128) -> Weight:
    """Shapes and dtypes of a weight [*lead, *shape]."""
    how = format_of(form, shape, block)
    if how is not None:
        return abstract_quantized((*lead, *shape), how)
    return jax.ShapeDtypeStruct((*lead, *shape), jnp.dtype(form))  # pyright: ignore[reportReturnType]


def random_weight(key: jax.Array, like: Weight) -> Weight:
    """Values such that products of unit variance come out with about unit variance."""
    if not isinstance(like, Quantized):
        depth = like.shape[-3 if len(like.shape) > 3 and like.shape[-2] == 2 else -2]
        return (jax.random.normal(key, like.shape, jnp.float32) * depth**-0.5).astype(like.dtype)
    number, factor = jax.random.split(key)
    how, scale = like.format, like.scale
    depth = like.shape[-len(how.blocks)]
    if how.kind == "fp8":
        data, spread = jax.random.normal(number, like.data.shape, jnp.float32).astype(how.dtype), 1.0
    elif how.kind == "int8":
        data, spread = jax.random.randint(number, like.data.shape, -127, 128, jnp.int32).astype(jnp.int8), 73.0
    else:
        data, spread = jax.random.bits(number, like.data.shape, jnp.uint8), 2.9
    size = depth**-0.5 / spread
    if how.exponent_scales:
        lowest = math.floor(127 + math.log2(size)) - 1
        return Quantized(
            data, jax.random.randint(factor, scale.shape, lowest, lowest + 3, jnp.int32).astype(jnp.uint8), how
        )
    return Quantized(data, jax.random.uniform(factor, scale.shape, jnp.float32, size / 2, size * 1.5), how)


def nbytes(weights: Mapping[str, Weight]) -> int:
    """Bytes of weights, scales included."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dict(weights)))
