"""Headers of safetensors files: where each tensor lies, read as strictly as the safetensors library does."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files.model_files import MOST_JSON_BYTES, parse_json, regular_file
from jaxspec.errors import CheckpointError

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
LENGTH_BYTES = 8
MOST_ENTRY = 200


@dataclass(frozen=True)
class Tensor:
    """The place of one tensor: file, dtype, shape and byte range."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file by name.

    Raises:
      CheckpointError: it is no regular file, truncated, or its header is corrupt: tensors overlap, leave gaps, or do
        not fill their bytes.
    """
    size = regular_file(file)[1]
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
                raise CheckpointError(
                    f"{file}: truncated: {size} bytes, the header alone needs {length + LENGTH_BYTES}; "
                    "download it again"
                )
            if length > MOST_JSON_BYTES:
                raise CheckpointError(f"{file}: a header of {length} bytes, at most {MOST_JSON_BYTES} are allowed")
            data = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    header = parse_json(data, f"{file}: the header", CheckpointError)
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    tensors = {name: _tensor(file, name, entry, start, size) for name, entry in header.items()}
    _check_filled(file, tensors, start, size)
    return tensors


def _tensor(file: Path, name: str, entry: Any, start: int, size: int) -> Tensor:
    try:
        dtype, shape, (first, last) = np.dtype(DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        if (
            not name.isprintable()
            or not isinstance(shape, list)
            or not all(type(n) is int and n >= 0 for n in (*shape, first, last))
        ):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        text = repr(entry)[:MOST_ENTRY]
        raise CheckpointError(f"{file}: tensor {name!r} has an unreadable entry {text}; the file is corrupt") from None
    begin, end = start + first, start + last
    if end > size:
        raise CheckpointError(f"{file}: truncated: {name!r} ends at byte {end}, the file has {size}; download it again")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{file}: {name!r} of shape {tuple(shape)} does not fill its {end - begin} bytes")
    return Tensor(file, dtype, tuple(shape), begin, end)


def _check_filled(file: Path, tensors: dict[str, Tensor], start: int, size: int) -> None:
    """Lets only files pass whose tensors lie one after another to the end."""
    at, before = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            how = "overlaps" if tensor.begin < at else "does not follow"
            raise CheckpointError(f"{file}: {name!r} {how} {before}; the file is corrupt, download it again")
        at, before = tensor.end, repr(name)
    if at != size:
        raise CheckpointError(
            f"{file}: {size - at} bytes after the last tensor; the file is corrupt, download it again"
        )
