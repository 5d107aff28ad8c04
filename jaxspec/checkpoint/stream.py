"""Tensors of a checkpoint directory, one at a time, straight from memory-mapped safetensors files."""

import json
import mmap
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxspec.errors import CheckpointError

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: file, dtype, shape and byte range."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFiles(Mapping[str, np.ndarray]):
    """All tensors of a directory by name; reading one maps it without a copy.

    Attributes:
      tensors: where they lie.
      taken: bytes by name of what was taken of them and let go of again.

    Raises:
      CheckpointError: no safetensors file, a shard named by the index is missing, or a file is truncated or corrupt.
    """

    def __init__(self, directory: Path):
        self._maps: dict[Path, mmap.mmap] = {}
        self.taken: Counter[str] = Counter()
        self.tensors: dict[str, Tensor] = {}
        for file in _files(directory):
            self.tensors |= _header(file)

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        if tensor.file not in self._maps:
            with tensor.file.open("rb") as handle:
                self._maps[tensor.file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        raw = np.frombuffer(self._maps[tensor.file], np.uint8, tensor.end - tensor.begin, tensor.begin)
        return raw.view(tensor.dtype).reshape(tensor.shape)

    def release(self, name: str, size: int) -> None:
        """Lets go of the memory that reading some bytes of a tensor or an entry took, and counts them."""
        self.taken[name] += size
        whole, _, entry = name.partition("[")
        tensor = self.tensors[whole]
        if tensor.file not in self._maps:
            return
        begin, end = tensor.begin, tensor.end
        if entry:
            size = (end - begin) // tensor.shape[0]
            begin += int(entry.rstrip("]")) * size
            end = begin + size
        begin -= begin % mmap.PAGESIZE
        self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def read(self, name: str) -> np.ndarray:
        """A tensor, or with ``name[i]`` the i-th entry of its first axis."""
        whole, _, entry = name.partition("[")
        return self[whole][int(entry.rstrip("]"))] if entry else self[whole]

    def size(self, name: str) -> int:
        """Bytes of what ``read`` gives."""
        return self.read(name).nbytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of what ``read`` gives."""
        whole, _, entry = name.partition("[")
        return self.tensors[whole].shape[1:] if entry else self.tensors[whole].shape

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a weight index ({error}); download the file again") from error
        missing = sorted(name for name in names if not (directory / name).exists())
        if missing:
            raise CheckpointError(f"{directory}: the index names shards that are not there: {missing}")
        return [directory / name for name in sorted(names)]
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory}: no .safetensors file; jaxspec reads Hugging Face directories of safetensors"
        )
    return files


def _header(file: Path) -> dict[str, Tensor]:
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file}: truncated: {size} bytes, the header alone needs {length + 8}")
        try:
            header = dict(json.loads(handle.read(length)))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: the header is not a JSON object ({error}); the file is corrupt") from error
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype = np.dtype(DTYPES[entry["dtype"]])
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            shape = tuple(operator.index(axis) for axis in entry["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: tensor {name!r} has an unreadable entry {entry!r}") from error
        if end > size:
            raise CheckpointError(f"{file}: truncated: {name!r} ends at byte {end}, the file has {size}")
        if begin < 8 + length or end - begin != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
            raise CheckpointError(f"{file}: {name!r} of shape {shape} does not fill its {end - begin} bytes")
        found[name] = Tensor(file, dtype, shape, begin, end)
    return found
