"""Blocks of GGUF tensors to numbers: widened as the ``gguf`` library does, or as small numbers with their scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.gguf.gguf_header import gguf_library
from jaxspec.errors import CheckpointError

# Types that are numbers of their own, not blocks.
PLAIN = {
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
}  # fmt: skip
GROUP = 32  # numbers per scale of the types below
MXFP4 = "MXFP4"
INT8 = ("Q8_0", "Q4_0", "Q5_0")  # a whole number from -128 to 127 times a scale, exactly


def widened(raw: np.ndarray, kind: str) -> np.ndarray:
    """Returns the numbers of rows of bytes: of their own type if that is plain, else float32.

    Raises:
      CheckpointError: the ``gguf`` library cannot widen the type.
    """
    if kind in PLAIN:
        return raw.view(PLAIN[kind])
    library = gguf_library()
    try:
        with np.errstate(all="ignore"):  # numbers that are not finite are refused by whoever loads them
            return library.quants.dequantize(raw, library.GGMLQuantizationType[kind])
    except NotImplementedError:
        raise CheckpointError(f"type {kind} cannot be widened by this version of the gguf library") from None


def int8_numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    """Returns the whole numbers of a matrix of one of the types ``INT8``."""
    block = _blocks(raw, kind)
    if kind == "Q8_0":
        numbers = block[..., 2:].view(np.int8)
    else:
        nibbles = block[..., -GROUP // 2 :]
        numbers = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
        if kind == "Q5_0":
            numbers |= np.unpackbits(block[..., 2:6], axis=-1, bitorder="little") << 4
        numbers = numbers.view(np.int8) - np.int8(8 if kind == "Q4_0" else 16)
    return numbers.reshape(len(raw), -1)


def int8_scales(raw: np.ndarray, kind: str) -> np.ndarray:
    """Returns the scale of each group of a matrix of one of the types ``INT8``, as float32."""
    scales = np.ascontiguousarray(_blocks(raw, kind)[..., :2])
    return scales.view(np.float16)[..., 0].astype(np.float32)


def fp4_numbers(raw: np.ndarray) -> np.ndarray:
    """Returns an MXFP4 matrix's numbers, neighbors sharing a byte; in GGUF the halves of a block share one."""
    nibbles = _blocks(raw, MXFP4)[..., 1:]
    numbers = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    return (numbers[..., 0::2] | numbers[..., 1::2] << 4).reshape(len(raw), -1)


def fp4_scales(raw: np.ndarray) -> np.ndarray:
    """Returns the exponents of an MXFP4 matrix, as the bytes of powers of two."""
    return np.ascontiguousarray(_blocks(raw, MXFP4)[..., 0])


def _blocks(raw: np.ndarray, kind: str) -> np.ndarray:
    size = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22, MXFP4: 17}[kind]
    return raw.reshape(len(raw), -1, size)
