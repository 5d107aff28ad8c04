"""Tensors of a checkpoint directory, one at a time, straight from memory-mapped safetensors files."""

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.shards import tensors_of


class TensorFiles(Mapping[str, np.ndarray]):
    """All tensors of a directory by name; reading one maps it without a copy.

    Attributes:
      tensors: where they lie.
      taken: bytes by name of what was taken of them and let go of again.

    Raises:
      CheckpointError: see ``tensors_of``.
    """

    def __init__(self, directory: Path):
        self._maps: dict[Path, mmap.mmap] = {}
        self.taken: Counter[str] = Counter()
        self.tensors: dict[str, Tensor] = tensors_of(directory)

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
