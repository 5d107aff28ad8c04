"""How a published matrix is stored: plainly, or as small numbers with a scale per block; and what it stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files.finite import all_finite, fault
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.nn.quantized import Format

Shape = tuple[int, ...]
FP8_BLOCK = (128, 128)
FP4_BLOCK = 32
ROWS = 128
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
PLAIN = tuple(map(np.dtype, (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)))
FACTORS = (*PLAIN[1:], E8M0)
BYTES = (np.dtype(np.int8), np.dtype(np.uint8))
EXPONENTS = (E8M0, np.dtype(np.uint8))

# E2M1: one sign bit, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, 5.3.3).
FP4_VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP8_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)

KNOWN_METHODS = ("fp8", "mxfp4")
SUPPORTED = (
    "supported are fp8 (e4m3) in blocks of 128 x 128 with weight_scale_inv or scale tensors, DeepSeek-V4's fp4 experts "
    "and gpt-oss's mxfp4; use such a copy, or a bfloat16 one with quantization=fp8 or int8"
)
OTHER_SCHEMES = {
    ".weight_packed": "packed integers (compressed-tensors)",
    ".qweight": "packed integers (AWQ or GPTQ)",
    ".weight.absmax": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes 8-bit",
    ".weight_scale": "numbers with a scale per tensor or channel (weight_scale)",
    ".input_scale": "fp8 with fixed activation scales (input_scale)",
}


@dataclass(frozen=True)
class Stored:
    """One published tensor under the name that tables know.

    Attributes:
      name: in tables; ``name[3]`` is an entry of a tensor's first axis.
      shape: of what it stands for.
      data: tensor of its numbers, or of itself.
      scale: tensor of its scales, None for a plain tensor.
      form: how numbers and scales lie along its two axes, None for a plain tensor.
      turned: whether both lie with the axes swapped.
      fresh: whether numbers and scales are yet to be made from a plain tensor.
    """

    name: str
    shape: Shape
    data: str
    scale: str | None = None
    form: Format | None = None
    turned: bool = False
    fresh: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """What it takes from the files."""
        return (self.data, self.scale) if self.scale else (self.data,)


def matrix_form(form: Format, block: tuple[int, int], *, turned: bool = False) -> Format:
    """How a kind of numbers and scales lies along the two axes of a published matrix."""
    if form.kind == "fp8":
        return replace(form, blocks=block)
    return replace(form, blocks=(FP4_BLOCK, 1) if turned else (1, FP4_BLOCK), packed_axis=-2 if turned else -1)


def check_method(config: Mapping[str, Any]) -> tuple[int, int]:
    """The block size of fp8 weights by a published config.

    Raises:
      ConfigError: the config names a way of quantisation that is not supported.
    """
    inside = [config, *(v for v in config.values() if isinstance(v, Mapping))]
    found = next((c["quantization_config"] for c in inside if isinstance(c.get("quantization_config"), Mapping)), {})
    method = found.get("quant_method")
    if found and method not in KNOWN_METHODS:
        raise ConfigError(f"config: quantised with {method!r}, which is not supported; {SUPPORTED}")
    block = found.get("weight_block_size") or FP8_BLOCK
    if len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ConfigError(f"config: weight_block_size must be two whole numbers, got {block!r}")
    return int(block[0]), int(block[1])


def storage_of(files: TensorFiles, name: str, block: tuple[int, int]) -> Stored | None:
    """How a tensor of a table is stored; None if it is missing.

    Args:
      files: where to look.
      name: of the tensor.
      block: numbers per scale of fp8 weights.
    """
    whole, bracket, entry = name.partition("[")
    entry = bracket + entry
    if whole in files:
        shape, stem = files.shape(name), whole.removesuffix(".weight")
        scale = next((s for s in (f"{whole}_scale_inv", f"{stem}.scale") if stem != whole and s in files), None)
        if scale is None or len(shape) != 2:
            return Stored(name, shape, name)
        exponents = files.tensors[scale].dtype in EXPONENTS
        if files.tensors[whole].dtype in BYTES:
            packed = matrix_form(Format("fp4", (), exponents), block)
            return Stored(name, (shape[0], 2 * shape[1]), name, scale + entry, packed)
        return Stored(name, shape, name, scale + entry, Format("fp8", block, exponents))
    blocks, scales = f"{whole}_blocks{entry}", f"{whole}_scales{entry}"
    if f"{whole}_blocks" not in files:
        return None
    out, groups, _ = (*files.shape(blocks), 0, 0)[:3]
    packed = matrix_form(Format("fp4", (), exponent_scales=True), block, turned=True)
    return Stored(name, (groups * FP4_BLOCK, out), blocks, scales, packed, turned=True)


def storage_faults(files: TensorFiles, stored: Stored, wanted: np.dtype) -> dict[str, list[str]]:
    """What is missing, of the wrong shape or of the wrong dtype about a tensor's numbers and scales.

    Args:
      files: that hold them.
      stored: the tensor.
      wanted: dtype of the parameter that it fills.
    """
    data = files.tensors[stored.data.partition("[")[0]].dtype
    whole = np.issubdtype(wanted, np.integer)
    if stored.scale is None and (whole or data not in (E4M3, *BYTES) or len(stored.shape) < 2):
        right = np.issubdtype(data, np.integer) if whole else data in PLAIN
        words = "whole numbers are needed" if whole else "floating point is needed"
        return {} if right else {"dtype": [f"{stored.name}: {data} in the file, {words}"]}
    if stored.scale is None:
        return {"missing": [f"scales of {stored.name}"]}
    form, scale = stored.form, stored.scale.partition("[")[0]
    if form is None or scale not in files:
        return {"missing": [scale]}
    found: dict[str, list[str]] = {"shape": [], "dtype": []}
    grid = form.scale_shape(stored.shape)
    grid = grid[::-1] if stored.turned else grid
    if files.shape(stored.scale) != grid:
        found["shape"].append(f"{stored.scale}: {files.shape(stored.scale)} in the file, {grid} by its weight's")
    if stored.turned and files.shape(stored.data)[2:] != (FP4_BLOCK // 2,):
        found["shape"].append(f"{stored.data}: {files.shape(stored.data)} in the file, not blocks of {FP4_BLOCK // 2}")
    if data not in (BYTES if form.kind == "fp4" else (E4M3,)):
        found["dtype"].append(f"{stored.data}: {data} with scales")
    factor = files.tensors[scale].dtype
    if factor not in (EXPONENTS if form.kind == "fp4" else FACTORS):
        found["dtype"].append(f"{stored.scale}: {factor}")
    return found


def other_scheme(names: list[str]) -> str | None:
    """Words for an unsupported way of quantisation that tensors of these names show, None if they do not."""
    return next((words for ending, words in OTHER_SCHEMES.items() if any(n.endswith(ending) for n in names)), None)


def values(files: TensorFiles, stored: Stored, dtype: np.dtype) -> np.ndarray:
    """What a tensor stands for; a plain one as it is, a quantised one in ``dtype``.

    Raises:
      CheckpointError: numbers or scales are not finite.
    """
    if stored.form is None:
        return files.read(stored.data)
    data = numbers(files, stored)
    check_numbers(files, data, stored)
    return dequantize(data, factors(files, stored), stored.form, dtype)


def numbers(files: TensorFiles, stored: Stored) -> np.ndarray:
    """The numbers of a quantised matrix along its own axes, as ``Format`` lays them out; a view of published ones."""
    raw, form = files.read(stored.data), stored.form
    assert form is not None, "plain tensors have no numbers"
    if stored.fresh:
        return quantize(raw, _own_scales(files, stored, form), form)
    if form.kind == "fp4":
        flat = raw.reshape(raw.shape[0], -1).view(np.uint8)
        return flat.T if stored.turned else flat
    return raw


def check_numbers(files: TensorFiles, data: np.ndarray, stored: Stored) -> None:
    """Makes sure that published e4m3 numbers are numbers.

    Args:
      files: that hold them.
      data: some of those of a tensor.
      stored: the tensor.

    Raises:
      CheckpointError: one is not.
    """
    if data.dtype == E4M3 and not stored.fresh and not all_finite(data):
        raise CheckpointError(fault(stored.data, files.read(stored.data)))


def factors(files: TensorFiles, stored: Stored) -> np.ndarray:
    """The scales of a quantised matrix along its own axes: float32, or the bytes of powers of two.

    Raises:
      CheckpointError: one is not a number.
    """
    form = stored.form
    assert form is not None, "plain tensors have no scales"
    if stored.fresh:
        return _own_scales(files, stored, form)
    raw = files.read(stored.scale or "")
    raw = raw.view(E8M0) if form.exponent_scales else raw
    if not all_finite(raw):
        raise CheckpointError(fault(stored.scale or "", raw, "scales"))
    raw = raw.view(np.uint8) if form.exponent_scales else raw.astype(np.float32)
    return raw.T if stored.turned else raw


def dequantize(data: np.ndarray, scale: np.ndarray, form: Format, dtype: np.dtype) -> np.ndarray:
    """A matrix from its numbers and scales: number times scale in float32, rounded once to ``dtype``."""
    axis = data.ndim + form.packed_axis if form.kind == "fp4" else -1
    shape = tuple(n * 2 if i == axis else n for i, n in enumerate(data.shape))
    scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127) if form.exponent_scales else scale
    out = np.empty(shape, dtype)
    for row in range(0, shape[0], ROWS):
        part = out[row : row + ROWS]
        first, stop = (row // 2, (row + ROWS) // 2) if axis == 0 else (row, row + ROWS)
        part[...] = _unpacked(data[first:stop], form, axis) * _spread(scale, form, row, part.shape)
    return out


def _spread(scale: np.ndarray, form: Format, row: int, shape: Shape) -> np.ndarray:
    """The scale of every number of some rows."""
    high, wide = form.blocks
    groups = np.arange(row, row + shape[0]) // high
    found = scale[groups[0] : groups[-1] + 1]
    if found.shape[1] > 1:
        found = np.repeat(found, wide, axis=1)[:, : shape[1]]
    return found if len(found) == 1 else found[groups - groups[0]]


def _unpacked(data: np.ndarray, form: Format, axis: int) -> np.ndarray:
    if form.kind == "int8":
        return data.astype(np.float32)
    if form.kind == "fp8":
        return FP8_VALUES[data.view(np.uint8)]
    both = np.stack([data & 15, data >> 4], axis=axis + 1)
    return FP4_VALUES[both.reshape(-1, data.shape[1]) if axis == 0 else both.reshape(data.shape[0], -1)]


def _own_scales(files: TensorFiles, stored: Stored, form: Format) -> np.ndarray:
    """The scales that a plain matrix is quantised with."""
    raw = files.read(stored.data)
    scale = block_scales(raw, form)
    if not all_finite(scale):
        raise CheckpointError(fault(stored.data, raw))
    return scale


def block_scales(x: np.ndarray, form: Format) -> np.ndarray:
    """Float32 scales that bring the largest number of each block of a plain matrix to the format's largest."""
    (rows, columns), (high, wide) = x.shape, form.blocks
    top = np.empty(form.scale_shape(x.shape), np.float32)
    step = ROWS if high == 1 else high
    for row in range(0, rows, step):
        part = np.abs(x[row : row + step].astype(np.float32))
        part = part if high == 1 else part.max(axis=0, keepdims=True)
        first = row // high
        top[first : first + len(part)] = np.maximum.reduceat(part, np.arange(0, columns, wide), axis=1)
    return np.where(top == 0, np.float32(1), top / _largest(form))


def _largest(form: Format) -> np.float32:
    return FP8_VALUES[0x7E] if form.kind == "fp8" else np.float32(127)


def quantize(x: np.ndarray, scale: np.ndarray, form: Format) -> np.ndarray:
    """The numbers of a plain matrix, rounded to the nearest, ties to even."""
    out = np.empty(x.shape, form.dtype)
    # The largest may be off by a rounding, which e4m3 would turn into not-a-number.
    limit = _largest(form)
    for row in range(0, x.shape[0], ROWS):
        part = x[row : row + ROWS].astype(np.float32)
        part = np.clip(part / _spread(scale, form, row, part.shape), -limit, limit)
        out[row : row + ROWS] = part if form.kind == "fp8" else np.rint(part)
    return out
