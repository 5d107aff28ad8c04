"""Weights as the CPU kernels read them: 32 columns lie together, and two depths of each next to each other."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantized import Format, Quantized, exponent

Array = jax.Array
PANEL = 32
Kind = Literal["bfloat16", "float32", "int8", "fp8", "fp4"]
KINDS: tuple[Kind, ...] = ("bfloat16", "float32", "int8", "fp8", "fp4")  # in the order of kernels.h


@partial(
    jax.tree_util.register_dataclass, data_fields=["data", "scale"], meta_fields=["kind", "inner", "outer", "group"]
)
@dataclass(frozen=True)
class Packed:
    """A weight [*lead, *inner, *outer] whose inner axes are contracted; lead are layers and experts.

    Attributes:
      data: by kind, for P panels of 32 columns and K depths: ``bfloat16`` [*lead, P, K/2, 32, 2], ``float32``
        [*lead, P, K, 32], ``int8`` and ``fp8`` [*lead, P, K/2, 2, 32], ``fp4`` (two depths per byte)
        [*lead, P, K/2, 32]; zeros beyond the weight.
      scale: [*lead, P, K / group, 32], float32 or the exponents of powers of two as bytes; [0] without scales.
      kind: how numbers are stored.
      inner, outer: sizes of the axes.
      group: depths that share a scale, 0 without scales.
    """

    data: Array
    scale: Array
    kind: Kind
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    group: int

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the axes that count layers and experts."""
        return self.data.shape[: -3 if self.kind in ("float32", "fp4") else -4]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight itself."""
        return (*self.lead, *self.inner, *self.outer)

    @property
    def depth(self) -> int:
        """Numbers along the depth as they lie, with the zeros that make it even."""
        return _even(math.prod(self.inner), self.kind)


def _even(depth: int, kind: Kind) -> int:
    return depth if kind == "float32" else depth + depth % 2


def packed_group(w: Array | Quantized, lead: int, axes: int) -> int | None:
    """Returns how many depths share a scale, 0 for a plain weight, None for one that cannot be packed."""
    if not isinstance(w, Quantized):
        return 0 if w.dtype in (jnp.bfloat16, jnp.float32) else None
    depth_axes, blocks = w.shape[lead : lead + axes], w.format.blocks[:axes]
    if len(w.format.blocks) != len(w.shape) - lead:
        return None
    if w.format.kind == "fp4" and (axes != 1 or w.format.packed_axis != lead - len(w.shape)):
        return None
    whole = all(block >= size for block, size in zip(blocks[1:], depth_axes[1:], strict=True))
    group = math.prod(min(b, n) for b, n in zip(blocks, depth_axes, strict=True))
    return group if whole and (group % 2 == 0 or group == math.prod(depth_axes)) else None


def pack(w: Array | Quantized, *, lead: int = 0, axes: int = 1) -> Packed:
    """Packs a weight.

    Args:
      w: [*lead, *inner, *outer], bfloat16, float32 or quantized, for which ``packed_group`` knows a group.
      lead: how many axes count layers and experts.
      axes: how many axes are contracted.
    """
    group = packed_group(w, lead, axes)
    if group is None:
        raise ValueError(f"a weight of {w.shape} with {axes} contracted axes cannot be packed")
    shape = w.shape
    first, inner, outer = shape[:lead], shape[lead : lead + axes], shape[lead + axes :]
    depth, columns = math.prod(inner), math.prod(outer)
    if not isinstance(w, Quantized):
        kind: Kind = "bfloat16" if w.dtype == jnp.bfloat16 else "float32"
        return Packed(_panels(w.reshape(-1, depth, columns), kind, first), _no_scale(), kind, inner, outer, 0)
    kind = w.format.kind
    stored = w.data.reshape(-1, depth // 2 if kind == "fp4" else depth, columns)
    data = _panels(lax.bitcast_convert_type(stored, jnp.uint8) if kind == "fp8" else stored, kind, first)
    scale = w.scale
    for axis, (block, size) in enumerate(zip(w.format.blocks[axes:], outer, strict=True), start=lead + axes):
        scale = lax.slice_in_dim(jnp.repeat(scale, block, axis=axis), 0, size, axis=axis) if block < size else scale
    scale = jnp.broadcast_to(scale, (*scale.shape[: lead + axes], *outer))
    scale = _columns(scale.reshape(math.prod(first), -1, columns))  # [X, groups, P, 32]
    return Packed(data, scale.swapaxes(1, 2).reshape(*first, *scale.shape[2:0:-1], PANEL), kind, inner, outer, group)


def _no_scale() -> Array:
    return jnp.zeros(0, jnp.float32)


def _columns(x_XKN: Array) -> Array:
    """[X, K, P, 32], zeros beyond the last column."""
    spare = -x_XKN.shape[2] % PANEL
    x_XKN = jnp.pad(x_XKN, ((0, 0), (0, 0), (0, spare)))
    return x_XKN.reshape(*x_XKN.shape[:2], -1, PANEL)


@partial(jax.jit, static_argnums=(1, 2))
def _panels(x_XKN: Array, kind: Kind, lead: tuple[int, ...]) -> Array:
    x = _columns(x_XKN)
    if kind in ("float32", "fp4"):
        return x.swapaxes(1, 2).reshape(*lead, x.shape[2], x.shape[1], PANEL)
    x = jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], -1, 2, *x.shape[2:])  # [X, K/2, 2, P, 32]
    order = (0, 3, 1, 4, 2) if kind == "bfloat16" else (0, 3, 1, 2, 4)
    x = x.transpose(order)
    return x.reshape(*lead, *x.shape[1:])


def unpack(w: Packed, dtype: Any = None) -> Array:
    """Returns the weight [*lead, *inner, *outer] as floats, for readers that know nothing of packing.

    Args:
      w: packed.
      dtype: bfloat16 for quantized weights and the stored one for others if None.
    """
    count, panels = math.prod(w.lead), w.data.shape[len(w.lead)]
    x = w.data.reshape(count, *w.data.shape[len(w.lead) :])
    if w.kind == "bfloat16":
        x = x.transpose(0, 2, 4, 1, 3)  # [X, K/2, 2, P, 32]
    elif w.kind in ("int8", "fp8"):
        x = x.transpose(0, 2, 3, 1, 4)
    else:
        x = x.swapaxes(1, 2)
    if w.kind == "fp4":
        x = jnp.stack([x & np.uint8(15), x >> np.uint8(4)], axis=2)
    x = x.reshape(count, -1, panels * PANEL)
    if w.group:
        form = Format(w.kind, (1,), packed_axis=-1)  # pyright: ignore[reportArgumentType]
        x = _values(x, form)
        scale = exponent(w.scale) if w.scale.dtype == jnp.uint8 else w.scale
        scale = scale.reshape(count, *scale.shape[len(w.lead) :]).swapaxes(1, 2).reshape(count, -1, panels * PANEL)
        x = x * jnp.repeat(scale, w.group, axis=1)[:, : x.shape[1]]
    x = x[:, : math.prod(w.inner), : math.prod(w.outer)].reshape(w.shape)
    return x.astype(dtype or (jnp.bfloat16 if w.group else x.dtype))


def _values(x: Array, form: Format) -> Array:
    """Stored numbers as float32."""
    if form.kind == "int8":
        return x.astype(jnp.float32)
    if form.kind == "fp8":
        return lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32)
    table = jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], jnp.float32)
    return table[x]
