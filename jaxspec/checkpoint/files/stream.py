"""Tensors of a checkpoint directory, one at a time, straight from memory-mapped safetensors files."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.shards import tensors_of


class TensorName(NamedTuple):
    """A tensor, or one entry of its first axis.

    Attributes:
      whole: name of the tensor in the files.
      entry: index along its first axis, None for all of it.
    """

    whole: str
    entry: int | None = None

    def __str__(self) -> str:
        return self.whole if self.entry is None else f"{self.whole}[{self.entry}]"


class TensorFiles(Mapping[str, np.ndarray]):
    """Tensors by name; reading one maps it without a copy.

    Attributes:
      tensors: where they lie.
      released: bytes by name of what was read and let go of again.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = dict(tensors)
        self.released: Counter[str] = Counter()
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def of(cls, directory: Path) -> TensorFiles:
        """Opens a directory's tensors.

        Raises:
          CheckpointError: see ``tensors_of``.
        """
        return cls(tensors_of(directory))

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        if tensor.file not in self._maps:
            with tensor.file.open("rb") as handle:
                self._maps[tensor.file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        raw = np.frombuffer(self._maps[tensor.file], np.uint8, tensor.end - tensor.begin, tensor.begin)
        return raw.view(tensor.dtype).reshape(tensor.shape)

    def read(self, name: TensorName) -> np.ndarray:
        """Returns a tensor, or an entry of its first axis."""
        return self[name.whole] if name.entry is None else self[name.whole][name.entry]

    def size(self, name: TensorName) -> int:
        """Returns the bytes of what ``read`` returns."""
        return self.read(name).nbytes

    def shape(self, name: TensorName) -> tuple[int, ...]:
        """Returns the shape of what ``read`` returns."""
        return self.tensors[name.whole].shape[0 if name.entry is None else 1 :]

    def dtype(self, name: TensorName) -> np.dtype:
        """Returns the dtype of what ``read`` returns."""
        return self.tensors[name.whole].dtype

    def release(self, name: TensorName, size: int) -> None:
        """Frees the memory that reading some bytes of a tensor took, and counts them."""
        self.released[str(name)] += size
        tensor = self.tensors[name.whole]
        if tensor.file not in self._maps:
            return
        begin, end = tensor.begin, tensor.end
        if name.entry is not None:
            size = (end - begin) // tensor.shape[0]
            begin += name.entry * size
            end = begin + size
        # Pages read from a file count as this process's memory until the kernel is told that they may go.
        begin -= begin % mmap.PAGESIZE
        self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
