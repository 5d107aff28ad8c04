"""Weights that stay quantized in memory: blocks of small numbers with a scale each, widened where they are used."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
E4M3_BIAS, E2M1_BIAS, E4M3_LEAST = 7, 1, np.float32(2.0**-9)


@dataclass(frozen=True)
class Format:
    """How one kind of weight is quantized.

    Attributes:
      kind: ``fp8`` (e4m3), ``int8``, or ``fp4`` (e2m1, two numbers per byte along ``packed_axis``).
      blocks: numbers per scale along each of the last axes; the last block of an axis may be shorter.
      exponent_scales: whether scales are powers of two, stored as the bytes of e8m0, instead of float32.
      packed_axis: axis of ``fp4`` along which the low and the high half of a byte are neighbors, counted from the end.
    """

    kind: Literal["fp8", "int8", "fp4"]
    blocks: tuple[int, ...]
    exponent_scales: bool = False
    packed_axis: int = 0

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the stored numbers."""
        return jnp.dtype({"fp8": jnp.float8_e4m3fn, "int8": jnp.int8, "fp4": jnp.uint8}[self.kind])

    @property
    def scale_dtype(self) -> jnp.dtype:
        """Dtype of the stored scales."""
        return jnp.dtype(jnp.uint8 if self.exponent_scales else jnp.float32)

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


@partial(jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=["format"])
@dataclass(frozen=True)
class Quantized:
    """A quantized weight; leading axes (layers, experts) may be sliced off like those of an array.

    Attributes:
      data: the numbers.
      scale: one factor per block.
      format: how they belong together.
    """

    data: Array
    scale: Array
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight itself."""
        f, shape = self.format, self.data.shape
        if f.kind != "fp4":
            return shape
        axis = len(shape) + f.packed_axis
        return (*shape[:axis], shape[axis] * 2, *shape[axis + 1 :])

    def widen(self, dtype: Any) -> Array:
        """The weight as floats: number times scale in float32, then rounded once to ``dtype``."""
        value = _unpacked(self.data, self.format)
        factor = exponent(self.scale) if self.format.exponent_scales else self.scale
        lead = value.ndim - len(self.format.blocks)
        for axis, block in enumerate(self.format.blocks, start=lead):
            factor = _spread(factor, axis, block, value.shape[axis])
        return (value * factor).astype(dtype)


Weight: TypeAlias = Array | Quantized


def form(w: Weight) -> str:
    """Names how a weight is stored, in one word: a dtype, or ``fp8``, ``int8``, ``mxfp4`` and the like."""
    if not isinstance(w, Quantized):
        return jnp.dtype(w.dtype).name
    return ("mx" if w.format.exponent_scales else "") + w.format.kind


def widen(w: Weight, dtype: Any = jnp.float32) -> Array:
    """A weight in the dtype of its product."""
    return w.widen(dtype) if isinstance(w, Quantized) else w.astype(dtype)


def abstract_quantized(shape: tuple[int, ...], form: Format) -> Quantized:
    """Shapes and dtypes of a quantized weight, nothing allocated."""
    data: Any = jax.ShapeDtypeStruct(form.data_shape(shape), form.dtype)
    scale: Any = jax.ShapeDtypeStruct(form.scale_shape(shape), form.scale_dtype)
    return Quantized(data, scale, form)


def _unpacked(data: Array, form: Format) -> Array:
    """The numbers as float32, without their scales."""
    if form.kind == "int8":
        return data.astype(jnp.float32)
    if form.kind == "fp8":
        bits = lax.bitcast_convert_type(data, jnp.uint8).astype(jnp.uint32)
        return _float(bits, exponent=4, mantissa=3, bias=E4M3_BIAS, least=E4M3_LEAST)
    axis = data.ndim + form.packed_axis
    both = jnp.stack([data & np.uint8(15), data >> np.uint8(4)], axis=axis + 1)
    half = both.reshape(*data.shape[:axis], -1, *data.shape[axis + 1 :])
    return _float(half.astype(jnp.uint32), exponent=2, mantissa=1, bias=E2M1_BIAS, least=np.float32(0.5))


def _float(bits: Array, *, exponent: int, mantissa: int, bias: int, least: np.float32) -> Array:
    """Small floats by their bits; on CPU half the time of XLA's own conversion, a third of a table's.

    Not-a-number is not known here; the loader refuses it.

    Args:
      bits: uint32.
      exponent: its width in bits.
      mantissa: its width in bits.
      bias: of the exponent.
      least: what the lowest mantissa bit counts where the exponent is 0.
    """
    magnitude = bits & np.uint32((1 << (exponent + mantissa)) - 1)
    shifted = (magnitude << np.uint32(23 - mantissa)) + np.uint32((127 - bias) << 23)
    # From integers, because XLA:CPU takes float32 numbers below the normal ones for 0.
    low = magnitude.astype(jnp.int32).astype(jnp.float32) * least
    value = jnp.where(magnitude < 1 << mantissa, low, lax.bitcast_convert_type(shifted, jnp.float32))
    sign = (bits >> np.uint32(exponent + mantissa)) << np.uint32(31)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.uint32) | sign, jnp.float32)


def exponent(scale: Array) -> Array:
    """2 ** (byte - 127) by its bits, also inside kernels.

    Where a backend takes 2 ** -127, which is subnormal, for 0, weights are off by < 3e-36.
    """
    byte = scale.astype(jnp.uint32)
    bits = jnp.where(byte == 0, np.uint32(1 << 22), byte << np.uint32(23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _spread(factor: Array, axis: int, block: int, size: int) -> Array:
    if block == 1 or factor.shape[axis] == 1:
        return factor  # as it is, or by broadcasting
    return lax.slice_in_dim(jnp.repeat(factor, block, axis=axis), 0, size, axis=axis)
