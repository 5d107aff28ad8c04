"""Tensors under their published names that are in memory already."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files.header import Tensor
from jaxspec.checkpoint.files.stream import TensorFiles, TensorName


class TensorsInMemory(TensorFiles):
    """Arrays of NumPy or JAX by published name; those of JAX come to the host one at a time."""

    def __init__(self, arrays: Mapping[str, Any]):
        self.arrays = arrays
        super().__init__({name: Tensor(Path(), np.dtype(x.dtype), x.shape, 0, 0) for name, x in arrays.items()})

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.arrays[name])

    def release(self, name: TensorName, size: int) -> None:
        """Counts the bytes; the arrays are the caller's."""
        self.released[str(name)] += size
