"""Weights as the CPU kernels read them: 32 columns lie together, and two depths of each next to each other."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.errors import ConfigError
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
      scale: [*lead, P, K / group, 32], float32 or the exponents of powers of two as bytes; [*lead, 0] without.
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
    group = _one_group(depth_axes, blocks)
    return None if group is None or (group % 2 and group < math.prod(depth_axes)) else group


def _one_group(sizes: tuple[int, ...], blocks: tuple[int, ...]) -> int | None:
    """Returns how many neighbors share a scale once axes are one, None if those that share are no neighbors."""
    group, whole = 1, True
    for axis in reversed(range(len(sizes))):
        own = min(blocks[axis], sizes[axis])
        ragged = sizes[axis] % own and math.prod(sizes[:axis]) > 1
        if own > 1 and (not whole or ragged):
            return None
        group, whole = group * own, whole and own == sizes[axis]
    return group


def abstract_packed(w: Array | Quantized, *, lead: int = 0, axes: int = 1) -> Packed | None:
    """Returns shapes and dtypes of a weight once packed, None if it cannot be packed.

    Args:
      w: [*lead, *inner, *outer], bfloat16, float32 or quantized, or its shape and dtype.
      lead: how many axes count layers and experts.
      axes: how many axes are contracted.
    """
    group = packed_group(w, lead, axes)
    if group is None:
        return None
    first, inner, outer = w.shape[:lead], w.shape[lead : lead + axes], w.shape[lead + axes :]
    depth, panels = math.prod(inner), -(-math.prod(outer) // PANEL)
    pairs = -(-depth // 2)
    if isinstance(w, Quantized):
        kind: Kind = w.format.kind
        dtype: Any = jnp.uint8 if kind == "fp8" else w.data.dtype
        scale: Any = jax.ShapeDtypeStruct((*first, panels, -(-depth // group), PANEL), w.scale.dtype)
    else:
        kind, dtype = "bfloat16" if w.dtype == jnp.bfloat16 else "float32", w.dtype
        scale = jax.ShapeDtypeStruct((*first, 0), jnp.float32)
    rest = {"bfloat16": (pairs, PANEL, 2), "float32": (depth, PANEL), "fp4": (pairs, PANEL)}.get(
        kind, (pairs, 2, PANEL)
    )
    data: Any = jax.ShapeDtypeStruct((*first, panels, *rest), dtype)
    return Packed(data, scale, kind, inner, outer, group)


def write_numbers(out: np.ndarray, part: np.ndarray, to: Packed) -> None:
    """Packs the numbers of one matrix.

    Args:
      out: one entry of the packed data.
      part: [*inner, *outer], of the dtype that is stored, or another float type for plain weights; for fp4 the first
        axis is half as long.
      to: the packed weight.
    """
    part = part.reshape(-1, math.prod(to.outer))
    if to.kind in ("int8", "fp8", "fp4"):
        part = part.view(out.dtype)
    elif part.dtype != out.dtype:
        part = part.astype(out.dtype)
    if to.kind == "bfloat16":  # numpy moves its own dtypes faster
        out, part = out.view(np.uint16), part.view(np.uint16)
    if to.kind in ("float32", "fp4"):
        _write_panels(out, part)
        return
    for odd in (0, 1):
        _write_panels(out[..., odd] if to.kind == "bfloat16" else out[:, :, odd], part[odd::2])


def _write_panels(out_PKC: np.ndarray, part_KN: np.ndarray) -> None:
    """Writes columns side by side, zeros beyond the last one and the last depth."""
    depth, columns = part_KN.shape
    full, rest = divmod(columns, PANEL)
    panels_KPC = part_KN[:, : full * PANEL].reshape(depth, full, PANEL)
    out_PKC[:full, :depth] = panels_KPC.swapaxes(0, 1)
    out_PKC[:, depth:] = 0
    if rest:
        out_PKC[full, :depth, :rest] = part_KN[:, full * PANEL :]
        out_PKC[full, :, rest:] = 0


def write_scales(out: np.ndarray, part: np.ndarray, to: Packed, form: Format) -> None:
    """Packs the scales of one matrix: one per column and group of depths, whatever shares them.

    Args:
      out: one entry of the packed scales.
      part: scales along each axis of the matrix.
      to: the packed weight.
      form: of the weight before.
    """
    axes = len(to.inner)
    for axis, (block, size) in enumerate(zip(form.blocks[axes:], to.outer, strict=True), start=axes):
        part = np.take(part, np.arange(size) // block, axis=axis)
    _write_panels(out, part.reshape(-1, math.prod(to.outer)))


def pack(w: Array | Quantized, *, lead: int = 0, axes: int = 1) -> Packed:
    """Packs a weight that is in memory; arguments as of ``abstract_packed``.

    Raises:
      ValueError: it cannot be packed.
    """
    to = abstract_packed(w, lead=lead, axes=axes)
    if to is None:
        raise ValueError(f"a weight of {w.shape} with {axes} contracted axes cannot be packed")
    data, scale = np.empty(to.data.shape, to.data.dtype), np.zeros(to.scale.shape, to.scale.dtype)
    numbers = np.asarray(w.data if isinstance(w, Quantized) else w)
    for entry in np.ndindex(*to.lead):
        write_numbers(data[entry], numbers[entry], to)
        if isinstance(w, Quantized):
            write_scales(scale[entry], np.asarray(w.scale[entry]), to, w.format)
    return replace(to, data=jnp.asarray(data), scale=jnp.asarray(scale))


def pack_like(old: Packed, new: Array) -> Packed:
    """Packs a plain weight as another one of its shape is, which has no scales.

    Raises:
      ConfigError: the other one has scales.
    """
    if old.group:
        raise ConfigError(f"parameters: a plain weight cannot take the place of a quantized one ({old.kind})")
    return pack(jnp.asarray(new, old.data.dtype), lead=len(old.lead), axes=len(old.inner))


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
    x = x.reshape(count, -1, panels * PANEL)[:, : math.prod(w.inner)]
    if w.group:
        x = _values(x, w.kind)
        scale = exponent(w.scale) if w.scale.dtype == jnp.uint8 else w.scale
        scale = scale.reshape(count, *scale.shape[len(w.lead) :]).swapaxes(1, 2).reshape(count, -1, panels * PANEL)
        x = x * jnp.repeat(scale, w.group, axis=1)[:, : x.shape[1]]
    x = x[:, :, : math.prod(w.outer)].reshape(w.shape)
    return x.astype(dtype or (jnp.bfloat16 if w.group else x.dtype))


def _values(x: Array, kind: Kind) -> Array:
    """Stored numbers as float32."""
    if kind == "int8":
        return x.astype(jnp.float32)
    if kind == "fp8":
        return lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32)
    table = jnp.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], jnp.float32)
    return table[x]
