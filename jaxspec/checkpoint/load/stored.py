"""Storage of a published matrix: plain, or as small numbers with a scale per block; and its reading."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files.finite import all_finite, fault
from jaxspec.checkpoint.files.stream import TensorFiles, TensorName
from jaxspec.checkpoint.load.block_scales import E4M3, block_scales, dequantize, quantize
from jaxspec.errors import CheckpointError, ConfigError
from pallas_kernels.quantized import Format

Shape = tuple[int, ...]
FP8_BLOCK = (128, 128)
FP4_BLOCK = 32
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
PLAIN = tuple(map(np.dtype, (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)))
FACTORS = (*PLAIN[1:], E8M0)
BYTES = (np.dtype(np.int8), np.dtype(np.uint8))
EXPONENTS = (E8M0, np.dtype(np.uint8))

# What a config must say for its method, besides what the tensors show; other values are refused.
KNOWN_METHODS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "fp8": {}, "mxfp4": {}, "fbgemm_fp8": {},
    "compressed-tensors": {
        "format": (None, "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
                   "nvfp4-pack-quantized", "mixed-precision"),
        "quantization_status": (None, "compressed"),
    },
    "modelopt": {"quant_algo": (None, "FP8", "NVFP4", "MIXED_PRECISION")},
    "modelopt_fp4": {"quant_algo": (None, "NVFP4")},
    "awq": {"bits": (4,), "version": (None, "gemm", "GEMM")},
    "gptq": {"bits": (2, 4, 8), "checkpoint_format": (None, "", "gptq")},
}  # fmt: skip
SUPPORTED = (
    "supported are fp8 (e4m3) in blocks or with a scale per channel or tensor, DeepSeek-V4's fp4 experts, gpt-oss's "
    "mxfp4, NVFP4, compressed-tensors' int4 and int8, AWQ and GPTQ; use such a copy, or a bfloat16 one with "
    "quantization=fp8 or int8"
)
OTHER_SCHEMES = {
    ".weight.absmax": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes 8-bit",
    ".weight_scale": "numbers with scales of a layout that is not known (weight_scale)",
    ".weight_packed": "packed numbers of a layout that is not known (weight_packed)",
}


@dataclass(frozen=True)
class Stored:
    """One published tensor under the name that tables know.

    Attributes:
      name: in tables.
      shape: of what it stands for.
      data: tensor of its numbers, or of itself.
      scale: tensor of its scales, None for a plain tensor.
      form: how numbers and scales lie along its two axes, None for a plain tensor.
      transposed: whether both lie with the axes swapped.
      to_quantize: whether numbers and scales are yet to be computed from a plain tensor.
    """

    name: TensorName
    shape: Shape
    data: TensorName
    scale: TensorName | None = None
    form: Format | None = None
    transposed: bool = False
    to_quantize: bool = False

    @property
    def tensors(self) -> tuple[TensorName, ...]:
        """The tensors that it takes from the files."""
        return (self.data, self.scale) if self.scale else (self.data,)


def matrix_form(form: Format, block: tuple[int, int], *, transposed: bool = False) -> Format:
    """Returns how a kind of numbers and scales lies along the two axes of a published matrix."""
    if form.kind == "fp8":
        return replace(form, blocks=block)
    blocks, axis = ((FP4_BLOCK, 1), -2) if transposed else ((1, FP4_BLOCK), -1)
    return replace(form, blocks=blocks, packed_axis=axis)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the ``quantization_config`` of a published config, or of the text model in it."""
    inside = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    return next((c["quantization_config"] for c in inside if isinstance(c.get("quantization_config"), Mapping)), None)


def check_method(config: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the block size of fp8 weights by a published config.

    Raises:
      ConfigError: the config names a way of quantization that is not supported.
    """
    settings = quantization_of(config) or {}
    method = settings.get("quant_method")
    if settings and method not in KNOWN_METHODS:
        raise ConfigError(f"config: quantized with {method!r}, which is not supported; {SUPPORTED}")
    for key, allowed in KNOWN_METHODS[str(method)].items() if settings else ():
        if settings.get(key) not in allowed:
            raise ConfigError(
                f"config: {method} with {key} {settings[key]!r} is not supported; supported are "
                f"{[x for x in allowed if x]}"
            )
    block = settings.get("weight_block_size") or FP8_BLOCK
    if len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise ConfigError(f"config: weight_block_size must be two whole numbers, got {block!r}")
    return int(block[0]), int(block[1])


def storage_of(files: TensorFiles, name: TensorName, block: tuple[int, int]) -> Stored | None:
    """Returns how a tensor of a table is stored; None if it is missing."""
    tensor, entry = name
    if tensor in files:
        shape, stem = files.shape(name), tensor.removesuffix(".weight")
        # DeepSeek-V3 publishes X.weight_scale_inv, DeepSeek-V4 X.scale; gpt-oss X_blocks with X_scales, see below.
        # GGUF's int8 matrices, and packed weights, are read as X.weight with X.group_scale.
        scales = (f"{tensor}_scale_inv", f"{stem}.scale", f"{stem}.group_scale")
        factor = next((s for s in scales if stem != tensor and s in files), None)
        if factor is None or len(shape) != 2:
            return Stored(name, shape, name)
        scale = TensorName(factor, entry)
        if factor.endswith(".group_scale"):
            kind = "fp8" if files.dtype(name) == E4M3 else "int8"
            return Stored(name, shape, name, scale, Format(kind, (1, shape[1] // files.shape(scale)[1])))
        exponents = files.dtype(scale) in EXPONENTS
        if files.dtype(name) in BYTES:
            packed = matrix_form(Format("fp4", (), exponents), block)
            return Stored(name, (shape[0], 2 * shape[1]), name, scale, packed)
        return Stored(name, shape, name, scale, Format("fp8", block, exponents))
    blocks, scales = TensorName(f"{tensor}_blocks", entry), TensorName(f"{tensor}_scales", entry)
    if blocks.whole not in files:
        return None
    out, groups, _ = (*files.shape(blocks), 0, 0)[:3]
    packed = matrix_form(Format("fp4", (), exponent_scales=True), block, transposed=True)
    return Stored(name, (groups * FP4_BLOCK, out), blocks, scales, packed, transposed=True)


def storage_faults(files: TensorFiles, stored: Stored, wanted: np.dtype) -> dict[str, list[str]]:
    """Returns what is missing, of the wrong shape or of the wrong dtype about a tensor's numbers and scales.

    Args:
      files: that hold them.
      stored: the tensor.
      wanted: dtype of the parameter that it fills.
    """
    data, is_integer = files.dtype(stored.data), np.issubdtype(wanted, np.integer)
    if stored.scale is None and (is_integer or data not in (E4M3, *BYTES) or len(stored.shape) < 2):
        right = np.issubdtype(data, np.integer) if is_integer else data in PLAIN
        words = "whole numbers are needed" if is_integer else "floating point is needed"
        return {} if right else {"dtype": [f"{stored.name}: {data} in the file, {words}"]}
    if stored.scale is None:
        return {"missing": [f"scales of {stored.name}"]}
    if stored.form is None or stored.scale.whole not in files:
        return {"missing": [stored.scale.whole]}
    return _faults_of_scaled(files, stored, stored.scale, stored.form)


def _faults_of_scaled(files: TensorFiles, stored: Stored, scale: TensorName, form: Format) -> dict[str, list[str]]:
    shapes, dtypes = [], []
    grid = form.scale_shape(stored.shape)
    grid = grid[::-1] if stored.transposed else grid
    if files.shape(scale) != grid:
        shapes.append(f"{scale}: {files.shape(scale)} in the file, {grid} by its weight's")
    if stored.transposed and files.shape(stored.data)[2:] != (FP4_BLOCK // 2,):
        shapes.append(f"{stored.data}: {files.shape(stored.data)} in the file, not blocks of {FP4_BLOCK // 2}")
    numbers = {"fp4": BYTES, "int8": BYTES[:1], "fp8": (E4M3,)}[form.kind]
    if files.dtype(stored.data) not in numbers:
        dtypes.append(f"{stored.data}: {files.dtype(stored.data)} with scales")
    if files.dtype(scale) not in (EXPONENTS if form.kind == "fp4" else FACTORS):
        dtypes.append(f"{scale}: {files.dtype(scale)}")
    return {"shape": shapes, "dtype": dtypes}


def other_scheme(names: list[str]) -> str | None:
    """Names the unsupported way of quantization that tensors of these names show, None if they show none."""
    return next((words for ending, words in OTHER_SCHEMES.items() if any(n.endswith(ending) for n in names)), None)


def read_values(files: TensorFiles, stored: Stored, dtype: np.dtype) -> np.ndarray:
    """Returns what a tensor stands for; a plain one as it is, a quantized one in ``dtype``.

    Raises:
      CheckpointError: numbers or scales are not finite.
    """
    if stored.form is None:
        return files.read(stored.data)
    data = read_numbers(files, stored)
    check_numbers(files, data, stored)
    return dequantize(data, read_scales(files, stored), stored.form, dtype)


def read_numbers(files: TensorFiles, stored: Stored) -> np.ndarray:
    """Returns the numbers of a quantized matrix as ``Format`` lays them out; a view of published ones."""
    raw, form = files.read(stored.data), stored.form
    assert form is not None, "plain tensors have no numbers"
    if stored.to_quantize:
        return quantize(raw, _new_scales(files, stored, form), form)
    if form.kind == "fp4":
        flat = raw.reshape(raw.shape[0], -1).view(np.uint8)
        return flat.T if stored.transposed else flat
    return raw


def check_numbers(files: TensorFiles, data: np.ndarray, stored: Stored) -> None:
    """Checks that published e4m3 numbers are numbers.

    Raises:
      CheckpointError: one is not.
    """
    if data.dtype == E4M3 and not stored.to_quantize and not all_finite(data):
        raise CheckpointError(fault(str(stored.data), files.read(stored.data)))


def read_scales(files: TensorFiles, stored: Stored) -> np.ndarray:
    """Returns the scales of a quantized matrix along its own axes: float32, or the bytes of powers of two.

    Raises:
      CheckpointError: one is not a number.
    """
    form = stored.form
    assert form is not None, "plain tensors have no scales"
    if stored.to_quantize:
        return _new_scales(files, stored, form)
    assert stored.scale is not None, "the plan lets no quantized tensor without scales pass"
    raw = files.read(stored.scale)
    raw = raw.view(E8M0) if form.exponent_scales else raw
    if not all_finite(raw):
        raise CheckpointError(fault(str(stored.scale), raw, "scales"))
    raw = raw.view(np.uint8) if form.exponent_scales else raw.astype(np.float32)
    return raw.T if stored.transposed else raw


def _new_scales(files: TensorFiles, stored: Stored, form: Format) -> np.ndarray:
    """Computes the scales that a plain matrix is quantized with."""
    raw = files.read(stored.data)
    scale = block_scales(raw, form)
    if not all_finite(scale):
        raise CheckpointError(fault(str(stored.data), raw))
    return scale
