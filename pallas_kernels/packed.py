"""Weights as kernels take them: plain arrays, or blocks of small numbers with a scale each."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Kind = Literal["fp8", "int8", "fp4"]
STORED = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8, "fp4": jnp.uint8}


@dataclass(frozen=True)
class Packing:
    """How one kind of weight is quantised.

    Attributes:
      kind: ``fp8`` (e4m3), ``int8``, or ``fp4`` (e2m1, two numbers per byte along ``packed_axis``).
      blocks: numbers per scale along each of the last axes; the last block of an axis may be shorter.
      exponent_scales: whether scales are powers of two, stored as the bytes of e8m0, instead of float32.
      packed_axis: axis of ``fp4`` along which the low and the high half of a byte are neighbours, counted from the end.
    """

    kind: Kind
    blocks: tuple[int, ...]
    exponent_scales: bool = False
    packed_axis: int = 0

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored numbers of a weight."""
        if self.kind != "fp4":
            return shape
        axis = len(shape) + self.packed_axis
        return (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a weight."""
        lead = len(shape) - len(self.blocks)
        return (*shape[:lead], *(-(-n // b) for n, b in zip(shape[lead:], self.blocks, strict=True)))


@partial(jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=["packing"])
@dataclass(frozen=True)
class Packed:
    """A quantised weight.

    Attributes:
      data: the numbers.
      scale: one factor per block.
      packing: how they belong together.
    """

    data: Any
    scale: Any
    packing: Packing

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight itself."""
        shape, axis = self.data.shape, self.data.ndim + self.packing.packed_axis
        return shape if self.packing.kind != "fp4" else (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])


Weight: TypeAlias = jax.Array | Packed


def abstract(shape: tuple[int, ...], packing: Packing) -> Packed:
    """Shapes and dtypes of a quantised weight, nothing allocated."""
    scale_dtype = jnp.uint8 if packing.exponent_scales else jnp.float32
    data = jax.ShapeDtypeStruct(packing.data_shape(shape), STORED[packing.kind])
    return Packed(data, jax.ShapeDtypeStruct(packing.scale_shape(shape), scale_dtype), packing)


def form(w: Weight) -> str:
    """How a weight is stored, in one word: a dtype, or ``fp8``, ``int8``, ``mxfp4`` and the like."""
    if not isinstance(w, Packed):
        return jnp.dtype(w.dtype).name
    return ("mx" if w.packing.exponent_scales else "") + w.packing.kind


def widen(w: Weight) -> jax.Array:
    """The weight as float32, number times scale."""
    if not isinstance(w, Packed):
        return w.astype(jnp.float32)
    value = numbers(w.data, w.packing.kind, w.packing.packed_axis)
    factor = exponent(w.scale) if w.packing.exponent_scales else w.scale
    lead = value.ndim - len(w.packing.blocks)
    for axis, block in enumerate(w.packing.blocks, start=lead):
        factor = lax.slice_in_dim(jnp.repeat(factor, block, axis=axis), 0, value.shape[axis], axis=axis)
    return value * factor


def numbers(data: jax.Array, kind: Kind, packed_axis: int) -> jax.Array:
    """The stored numbers as float32, without their scales."""
    if kind != "fp4":
        return data.astype(jnp.float32)
    axis = data.ndim + packed_axis
    both = jnp.stack([data & np.uint8(15), data >> np.uint8(4)], axis=axis + 1)
    codes = both.reshape(*data.shape[:axis], -1, *data.shape[axis + 1 :])
    table = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return jnp.asarray(np.concatenate([table, -table]))[codes.astype(jnp.int32)]


def exponent(byte: jax.Array) -> jax.Array:
    """2 ** (byte - 127) as float32, by its bits; made of what kernels can do."""
    wide = byte.astype(jnp.uint32)
    return lax.bitcast_convert_type(jnp.where(wide == 0, np.uint32(1 << 22), wide << np.uint32(23)), jnp.float32)
