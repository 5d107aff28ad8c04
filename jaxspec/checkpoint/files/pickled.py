"""Tensors of a PyTorch archive (``.bin``, ``.pt``), found without PyTorch and without running anything in it."""

import io
import math
import operator
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.model_files import regular_file
from jaxspec.errors import CheckpointError

STORAGES = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32, "ShortStorage": np.int16,
    "CharStorage": np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_,
}  # fmt: skip
CURE = (
    "load it where PyTorch is installed, with torch.load(..., weights_only=True), and write it again with "
    "safetensors.torch.save_file"
)
LOCAL_HEADER = 30
BROKEN = (
    zipfile.BadZipFile, zlib.error, struct.error, pickle.UnpicklingError, LookupError, ValueError, TypeError,
    AttributeError, EOFError, OSError, OverflowError, RecursionError, NotImplementedError, RuntimeError, MemoryError,
)  # fmt: skip
MOST_PICKLED_BYTES = 100_000_000


@dataclass(frozen=True)
class _Storage:
    """One array of numbers of the archive."""

    dtype: np.dtype
    key: str
    count: int


@dataclass(frozen=True)
class _View:
    """A tensor: a part of such an array."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are contiguous, the last axis fastest."""
        step = 1
        for size, stride in zip(self.shape[::-1], self.stride[::-1], strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> _View:
    if not isinstance(storage, _Storage):
        raise CheckpointError("it stores something other than arrays of numbers")
    numbers = [tuple(map(operator.index, axes)) for axes in ((offset,), shape, stride)]
    if any(n < 0 for n in (*numbers[0], *numbers[1])):
        raise CheckpointError("a tensor has a negative size or offset")
    return _View(storage, numbers[0][0], numbers[1], numbers[2])


def _parameter(view: Any, *_: Any) -> Any:
    return view


KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


class _Unpickler(pickle.Unpickler):
    """Knows tensors and dictionaries of them; every other name in the stream is refused, nothing is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return np.dtype(STORAGES[name])
        known = KNOWN.get((module, name))
        if known is None:
            raise CheckpointError(f"it names {module}.{name}, which is no part of plain tensors")
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise CheckpointError("it stores something other than arrays of numbers")
        return _Storage(dtype, str(key), int(count))


def pickled_tensors(file: Path) -> dict[str, Tensor]:
    """Returns where the tensors of an archive lie; their bytes are read like those of safetensors files.

    Args:
      file: as ``torch.save`` writes a dictionary of tensors, PyTorch 1.6 or later.

    Raises:
      CheckpointError: the file is not such an archive, or it holds something else than plain tensors.
    """
    regular_file(file)
    try:
        with zipfile.ZipFile(file) as archive:
            views = _views(archive)
            return {name: _placed(file, archive, name, view) for name, view in views.items()}
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}; {CURE}") from None
    except BROKEN as error:
        raise CheckpointError(f"{file}: not a readable PyTorch archive ({error}); {CURE}") from error


def _views(archive: zipfile.ZipFile) -> dict[str, _View]:
    index = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
    if index is None:
        raise CheckpointError("it has no data.pkl")
    order = index.removesuffix("data.pkl") + "byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise CheckpointError("its numbers are big-endian")
    if archive.getinfo(index).file_size > MOST_PICKLED_BYTES:
        raise CheckpointError(f"its data.pkl has more than {MOST_PICKLED_BYTES} bytes")
    state = _Unpickler(io.BytesIO(archive.read(index))).load()
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if isinstance(state, _View):
        state = {"tensor": state}
    if isinstance(state, dict):  # notes beside the tensors
        state = {name: value for name, value in state.items() if not isinstance(value, int | str)}
    if not isinstance(state, dict) or not all(isinstance(view, _View) for view in state.values()):
        raise CheckpointError("it is not a dictionary of tensors")
    return {str(name): view for name, view in state.items()}


def _placed(file: Path, archive: zipfile.ZipFile, name: str, view: _View) -> Tensor:
    folder = next(n for n in archive.namelist() if n.endswith("/data.pkl")).removesuffix("data.pkl")
    entry = archive.getinfo(f"{folder}data/{view.storage.key}")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError("it is compressed")
    if not view.is_plain:
        raise CheckpointError(f"{name} is a turned or strided view")
    with file.open("rb") as handle:
        handle.seek(entry.header_offset)
        header = handle.read(LOCAL_HEADER)
    start = entry.header_offset + LOCAL_HEADER + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    size = view.storage.dtype.itemsize
    begin = start + view.offset * size
    end = begin + math.prod(view.shape) * size
    if end > start + entry.file_size or entry.file_size != view.storage.count * size:
        raise CheckpointError(f"{name} does not fit the numbers stored for it")
    return Tensor(file, view.storage.dtype, view.shape, begin, end)
