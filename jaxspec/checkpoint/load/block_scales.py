"""Matrices to and from small numbers with one scale per block, by the values that the formats define."""

import ml_dtypes
import numpy as np

from pallas_kernels.quantized import Format

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ROWS = 128  # computed at a time, to keep temporary arrays small

# E2M1: one sign bit, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, 5.3.3).
FP4_VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP8_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


def dequantize(data: np.ndarray, scale: np.ndarray, form: Format, dtype: np.dtype) -> np.ndarray:
    """Computes a matrix from its numbers and scales: number times scale in float32, rounded once to ``dtype``."""
    axis = data.ndim + form.packed_axis if form.kind == "fp4" else -1
    shape = tuple(n * 2 if i == axis else n for i, n in enumerate(data.shape))
    scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127) if form.exponent_scales else scale
    out = np.empty(shape, dtype)
    for row in range(0, shape[0], ROWS):
        part = out[row : row + ROWS]
        first, stop = (row // 2, (row + ROWS) // 2) if axis == 0 else (row, row + ROWS)
        part[...] = _unpack(data[first:stop], form, axis) * _spread(scale, form, row, part.shape)
    return out


def quantize(x: np.ndarray, scale: np.ndarray, form: Format) -> np.ndarray:
    """Computes the numbers of a plain matrix, rounded to the nearest, ties to even."""
    out, limit = np.empty(x.shape, form.dtype), _largest(form)
    for row in range(0, x.shape[0], ROWS):
        part = x[row : row + ROWS].astype(np.float32)
        # The largest number may exceed the limit by a rounding, which e4m3 would turn into not-a-number.
        part = np.clip(part / _spread(scale, form, row, part.shape), -limit, limit)
        out[row : row + ROWS] = part if form.kind == "fp8" else np.rint(part)
    return out


def block_scales(x: np.ndarray, form: Format) -> np.ndarray:
    """Computes float32 scales that bring the largest number of each block to the format's largest."""
    (rows, columns), (high, wide) = x.shape, form.blocks
    top = np.empty(form.scale_shape(x.shape), np.float32)
    step = ROWS if high == 1 else high
    for row in range(0, rows, step):
        part = np.abs(x[row : row + step].astype(np.float32))
        part = part if high == 1 else part.max(axis=0, keepdims=True)
        first = row // high
        # reduceat and not a reshape: the last block of a row may be shorter.
        top[first : first + len(part)] = np.maximum.reduceat(part, np.arange(0, columns, wide), axis=1)
    return np.where(top == 0, np.float32(1), top / _largest(form))


def _largest(form: Format) -> np.float32:
    return FP8_VALUES[0x7E] if form.kind == "fp8" else np.float32(127)


def _spread(scale: np.ndarray, form: Format, row: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the scale of every number of some rows, or of one row that stands for all."""
    high, wide = form.blocks
    groups = np.arange(row, row + shape[0]) // high
    rows = scale[groups[0] : groups[-1] + 1]
    if rows.shape[1] > 1:
        rows = np.repeat(rows, wide, axis=1)[:, : shape[1]]
    return rows if len(rows) == 1 else rows[groups - groups[0]]


def _unpack(data: np.ndarray, form: Format, axis: int) -> np.ndarray:
    if form.kind == "int8":
        return data.astype(np.float32)
    if form.kind == "fp8":
        return FP8_VALUES[data.view(np.uint8)]
    halves = np.stack([data & 15, data >> 4], axis=axis + 1)
    return FP4_VALUES[halves.reshape(-1, data.shape[1]) if axis == 0 else halves.reshape(data.shape[0], -1)]
