"""Weights of compressed-tensors, ModelOpt, AWQ and GPTQ under the names of plain ones: numbers with group scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.stream import TensorFiles, TensorName
from jaxspec.errors import CheckpointError

E4M3, INT8, FLOAT32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8), np.dtype(np.float32)
SCALE = "group_scale"
WORD = 32
# Numbers of e2m1 times two are whole (OCP Microscaling Formats 1.0, 5.3.3).
E2M1_DOUBLED = np.asarray([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of a word each of eight neighbors lies in
# Not needed for what weights stand for: activations are not quantized here, and shapes are known.
UNUSED = ("weight_shape", "input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale")


@dataclass(frozen=True)
class DecodedWeight:
    """A tensor that published ones stand for.

    Attributes:
      tensors: that it is made of.
      decode: makes it of their arrays.
      shape, dtype: of it.
    """

    tensors: tuple[str, ...]
    decode: Callable[..., np.ndarray]
    shape: tuple[int, ...]
    dtype: np.dtype


class PackedFiles(TensorFiles):
    """Files whose packed weights read as ``X.weight`` (int8 or e4m3) and ``X.group_scale`` [out, groups] (float32).

    Number times scale in float32 is exactly what the layout defines. GPTQ weights whose inputs are in the order of
    activations have no groups of neighbors, and read as floats.

    Attributes:
      files: as published.
      decoded: by name.
    """

    def __init__(self, files: TensorFiles):
        self.files, self.decoded = files, _decoded(files)
        taken = {name for weight in self.decoded.values() for name in weight.tensors}
        stems = {name.rpartition(".")[0] for name in self.decoded}
        taken |= {f"{stem}.{name}" for stem in stems for name in (*UNUSED, "g_idx", "weight_g_idx", "qzeros")}
        plain = {name: tensor for name, tensor in files.tensors.items() if name not in taken}
        super().__init__(plain | {name: self._tensor(weight) for name, weight in self.decoded.items()})

    def _tensor(self, weight: DecodedWeight) -> Tensor:
        first = self.files.tensors[weight.tensors[0]]
        return Tensor(first.file, weight.dtype, weight.shape, first.begin, first.begin + self._bytes(weight))

    def _bytes(self, weight: DecodedWeight) -> int:
        tensors = (self.files.tensors[name] for name in weight.tensors)
        return sum(tensor.end - tensor.begin for tensor in tensors)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.decoded:
            return self.files[name]
        weight = self.decoded[name]
        try:
            array = weight.decode(*(self.files[part] for part in weight.tensors))
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}") from error
        if array.shape != weight.shape:
            raise CheckpointError(f"{name}: {weight.tensors} make {array.shape}, {weight.shape} by their headers")
        return array

    def size(self, name: TensorName) -> int:
        return self._bytes(self.decoded[name.whole]) if name.whole in self.decoded else self.files.size(name)

    def release(self, name: TensorName, size: int) -> None:
        weight = self.decoded.get(name.whole)
        self.released[str(name)] += size
        for part in (name,) if weight is None else map(TensorName, weight.tensors):
            self.files.release(part, self.files.tensors[part.whole].end - self.files.tensors[part.whole].begin)


def with_packed_weights(files: TensorFiles) -> TensorFiles:
    """Returns files whose packed weights read like plain ones with scales; others as they are.

    Raises:
      CheckpointError: shapes of packed weights and their scales do not fit each other.
    """
    endings = ("weight_packed", "weight_scale", "weight_scale_2", "qweight")
    return PackedFiles(files) if any(name.rpartition(".")[2] in endings for name in files) else files


def _decoded(files: TensorFiles) -> dict[str, DecodedWeight]:
    """Returns weights and scales by the names that they read under."""
    out: dict[str, DecodedWeight] = {}
    for name in files:
        stem, _, ending = name.rpartition(".")
        if ending == "weight_packed":
            out |= (_nvfp4 if files.tensors[name].dtype.itemsize == 1 else _packed_integers)(files, stem, name)
        elif ending == "qweight":
            out |= _words(files, stem)
        elif ending == "weight_scale" and f"{stem}.weight" in files:
            two = f"{stem}.weight_scale_2" in files and files.tensors[f"{stem}.weight"].dtype != E4M3
            out |= _nvfp4(files, stem, f"{stem}.weight") if two else _scaled(files, stem)
    return out


def _of(files: TensorFiles, stem: str, *names: str) -> tuple[Tensor, ...]:
    missing = [name for name in names if f"{stem}.{name}" not in files]
    if missing:
        raise CheckpointError(f"{stem}: {', '.join(missing)} of its packed weight is missing; download it again")
    return tuple(files.tensors[f"{stem}.{name}"] for name in names)


def _named(stem: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{stem}.{name}" for name in names)


def _both(stem: str, numbers: DecodedWeight, scales: DecodedWeight) -> dict[str, DecodedWeight]:
    (rows, columns), (scale_rows, groups) = numbers.shape, scales.shape
    if scale_rows != rows or not groups or columns % groups:
        raise CheckpointError(f"{stem}: scales of {scales.shape} do not fit a weight of {numbers.shape}")
    return {f"{stem}.weight": numbers, f"{stem}.{SCALE}": scales}


def _scaled(files: TensorFiles, stem: str) -> dict[str, DecodedWeight]:
    """One number a weight, e4m3 or int8, with a scale per tensor, channel, group or block."""
    weight, scale = _of(files, stem, "weight", "weight_scale")
    if len(weight.shape) != 2:
        raise CheckpointError(f"{stem}.weight: {weight.shape} with a weight_scale; matrices are supported")
    if f"{stem}.weight_zero_point" in files:
        raise CheckpointError(f"{stem}: int8 with zero points is not supported; symmetric int8 is")
    rows = weight.shape[0]
    numbers = DecodedWeight(_named(stem, "weight"), _same, weight.shape, weight.dtype)
    if math.prod(scale.shape) in (1, rows):
        shape: tuple[int, ...] = (rows, 1)
    elif len(scale.shape) == 2 and scale.shape[0] == rows:
        shape = scale.shape
    else:  # a block of rows and columns
        block = DecodedWeight(_named(stem, "weight_scale"), _float32, scale.shape, FLOAT32)
        return {f"{stem}.weight": numbers, f"{stem}.weight_scale_inv": block}
    spread = partial(_spread, shape=shape)
    return _both(stem, numbers, DecodedWeight(_named(stem, "weight_scale"), spread, shape, FLOAT32))


def _nvfp4(files: TensorFiles, stem: str, name: str) -> dict[str, DecodedWeight]:
    """Two e2m1 numbers a byte, with an e4m3 scale per group and a float32 one for all.

    compressed-tensors divides by ``weight_global_scale``, ModelOpt multiplies by ``weight_scale_2``.
    """
    divides = f"{stem}.weight_global_scale" in files
    whole = "weight_global_scale" if divides else "weight_scale_2"
    (scale, _), (rows, half) = _of(files, stem, "weight_scale", whole), files.tensors[name].shape
    numbers = DecodedWeight((name,), _e2m1_doubled, (rows, 2 * half), INT8)
    halves = partial(_half_scale, divides=divides)
    return _both(stem, numbers, DecodedWeight(_named(stem, "weight_scale", whole), halves, scale.shape, FLOAT32))


def _packed_integers(files: TensorFiles, stem: str, name: str) -> dict[str, DecodedWeight]:
    """compressed-tensors: words of integers along the inputs, each plus half of its range."""
    (scale,), (rows, words) = _of(files, stem, "weight_scale"), files.tensors[name].shape
    if f"{stem}.weight_g_idx" in files:
        raise CheckpointError(f"{stem}: groups in the order of activations (weight_g_idx) are not supported here")
    columns = int(files[f"{stem}.weight_shape"][1]) if f"{stem}.weight_shape" in files else 0
    bits = WORD * words // columns if columns else 4
    if bits not in (4, 8):
        raise CheckpointError(f"{name}: {bits} bits are not supported; 4 and 8 are")
    shape = (rows, columns or words * WORD // bits)
    parts, decode = (name,), partial(_signed, bits=bits, columns=shape[1])
    if f"{stem}.weight_zero_point" in files:
        parts = (name, f"{stem}.weight_zero_point")
        decode = partial(_signed_from_zero, bits=bits, shape=shape)
    grid = scale.shape if len(scale.shape) == 2 else (rows, 1)
    spread = partial(_spread, shape=grid)
    scales = DecodedWeight(_named(stem, "weight_scale"), spread, grid, FLOAT32)
    return _both(stem, DecodedWeight(parts, decode, shape, INT8), scales)


def _words(files: TensorFiles, stem: str) -> dict[str, DecodedWeight]:
    """AWQ: words along the outputs; GPTQ: along the inputs, and zero points less one. Scales [groups, out]."""
    weight, zeros, scale = _of(files, stem, "qweight", "qzeros", "scales")
    groups, rows = scale.shape
    scales = DecodedWeight(_named(stem, "scales"), _transposed, (rows, groups), FLOAT32)
    if weight.shape[1] * (WORD // 4) == rows:
        shape = (rows, weight.shape[0])
        decode = partial(_awq, groups=groups)
        return _both(stem, DecodedWeight(_named(stem, "qweight", "qzeros"), decode, shape, INT8), scales)
    bits = WORD * zeros.shape[1] // rows
    if bits not in (2, 4, 8) or weight.shape[1] != rows:
        raise CheckpointError(
            f"{stem}: qweight of {weight.shape} with scales of {scale.shape} is neither AWQ nor GPTQ of 2, 4 or 8 bits"
        )
    shape = (rows, weight.shape[0] * WORD // bits)
    parts = _named(stem, "qweight", "qzeros")
    if not _in_order(files, stem, shape[1], groups):
        decode = partial(_gptq_floats, bits=bits)
        return {
            f"{stem}.weight": DecodedWeight((*parts, *_named(stem, "scales", "g_idx")), decode, shape, FLOAT32)
        }  # fmt: skip
    decode = partial(_gptq, bits=bits, groups=groups)
    return _both(stem, DecodedWeight(parts, decode, shape, INT8), scales)


def _in_order(files: TensorFiles, stem: str, columns: int, groups: int) -> bool:
    """Whether neighbors share a group."""
    name = f"{stem}.g_idx"
    return name not in files or np.array_equal(files[name], np.arange(columns) // (columns // groups))


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32)


def _transposed(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.T).astype(np.float32)


def _spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    scale = scale.astype(np.float32)
    return np.broadcast_to(scale.reshape(()), shape).copy() if scale.size == 1 else scale.reshape(shape)


def _e2m1_doubled(packed: np.ndarray) -> np.ndarray:
    bytes_ = packed.view(np.uint8)
    return E2M1_DOUBLED[np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(len(bytes_), -1)]


def _half_scale(scale: np.ndarray, whole: np.ndarray, *, divides: bool) -> np.ndarray:
    one, factor = scale.astype(np.float32), whole.astype(np.float32).reshape(())
    return (one / factor if divides else one * factor) * np.float32(0.5)


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the unsigned numbers of words along the last axis, the lowest bits first."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    parts = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return parts.astype(np.int16).reshape(*words.shape[:-1], -1)


def _as_int8(numbers: np.ndarray) -> np.ndarray:
    if numbers.min(initial=0) < -128 or numbers.max(initial=0) > 127:
        raise ValueError(f"numbers from {numbers.min()} to {numbers.max()} less their zero points do not fit 8 bits")
    return numbers.astype(np.int8)


def _signed(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    return _as_int8(_unpacked(np.ascontiguousarray(words), bits)[:, :columns] - 2 ** (bits - 1))


def _signed_from_zero(words: np.ndarray, zeros: np.ndarray, bits: int, shape: tuple[int, int]) -> np.ndarray:
    # Zero points are packed along the outputs, offset as the numbers are, so that the offsets cancel.
    zero = zeros.astype(np.int16) + 2 ** (bits - 1)
    if zeros.dtype.itemsize == WORD // 8:
        zero = _unpacked(np.ascontiguousarray(zeros.T), bits)[:, : shape[0]].T
    numbers = _unpacked(np.ascontiguousarray(words), bits)[:, : shape[1]]
    return _as_int8(numbers - np.repeat(zero, shape[1] // zero.shape[1], axis=1))


def _awq(words: np.ndarray, zeros: np.ndarray, groups: int) -> np.ndarray:
    def in_order(packed: np.ndarray) -> np.ndarray:
        numbers = _unpacked(packed, 4)
        return numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_ORDER].reshape(len(numbers), -1)

    numbers = in_order(words)
    return _as_int8((numbers - np.repeat(in_order(zeros), len(numbers) // groups, axis=0)).T)


def _gptq_numbers(words: np.ndarray, zeros: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers [out, in] and zero points [groups, out]."""
    return _unpacked(np.ascontiguousarray(words.T), bits), _unpacked(zeros, bits) + 1


def _gptq(words: np.ndarray, zeros: np.ndarray, bits: int, groups: int) -> np.ndarray:
    numbers, zero = _gptq_numbers(words, zeros, bits)
    return _as_int8(numbers - np.repeat(zero.T, numbers.shape[1] // groups, axis=1))


def _gptq_floats(
    words: np.ndarray, zeros: np.ndarray, scale: np.ndarray, group: np.ndarray, bits: int
) -> np.ndarray:  # fmt: skip
    numbers, zero = _gptq_numbers(words, zeros, bits)
    return (numbers - zero.T[:, group]).astype(np.float32) * scale.astype(np.float32).T[:, group]
