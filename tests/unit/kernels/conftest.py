"""What tests of bits need of the simulations."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Mosaic's simulation sum every number of a product alike, as ``wgmma`` does.

    It multiplies with ``np.matmul``, so by OpenBLAS, which on some CPUs (AMD's with AVX2) rounds a row differently at
    another place of a block.
    """

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return np.einsum("mk,kn->mn", a.astype(dtype), b.astype(dtype))

    monkeypatch.setattr(np, "matmul", matmul)
