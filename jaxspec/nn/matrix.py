"""A weight used only in matrix products: keeps (stack, index) to avoid slicing out a copy, and picks the kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.native.packing import Packed, unpack
from jaxspec.native.product import product
from jaxspec.nn.policy import Kernels
from jaxspec.shapes import Array
from pallas_kernels.few_rows_dense.api import (
    MOST_ROWS,
    OP,
    case_name,
    few_rows_dense,
    flat,
    obstacles,
    products_of_rows,
)
from pallas_kernels.quantized import Quantized
from pallas_kernels.select import Choice, choose

UNPACKED = "weights are packed when a checkpoint is loaded, if no scale begins within a pair of depths"


@dataclass(frozen=True)
class Matrix:
    """A weight, or one layer's entry of a stack, which is not sliced out of it because a slice would be a copy.

    Attributes:
      whole: [D, ...], or [L, D, ...] with a layer; packed at loading where native kernels compute.
      layer: int32 index in the stack, None without one.
      kernels: see ``Compute.kernels``.
    """

    whole: Array | Quantized | Packed
    layer: Array | None
    kernels: Kernels = "xla"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight itself."""
        return self.whole.shape if self.layer is None else self.whole.shape[1:]

    def own(self) -> Array | Quantized:
        """Returns the weight by itself."""
        layer, own = self.layer, self.whole
        if layer is not None:
            own = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False), own)
        return unpack(own) if isinstance(own, Packed) else own

    def product(self, x_MD: Array, dtype: Any, axes: int = 1) -> Array | None:
        """``x_MD`` times the weight by its kernel, float32 [M, N]; None where XLA computes it.

        Args:
          x_MD: rows.
          dtype: of both factors.
          axes: how many axes of the weight are contracted.
        """
        if isinstance(self.whole, Packed):
            choose(OP, f"M{x_MD.shape[0]} weight of {self.shape}", "native", "cpu", [])
            return product(x_MD, self.whole, layer=self.layer, dtype=dtype)
        return self._few_rows(x_MD, dtype, axes, summed=True)

    def parts(self, x_MD: Array, dtype: Any, axes: int = 1) -> Array | None:
        """The same not yet added up, [S, M, N], for a kernel that reads it; None where no GPU's kernel computes it."""
        return None if isinstance(self.whole, Packed) else self._few_rows(x_MD, dtype, axes, summed=False)

    def _few_rows(self, x_MD: Array, dtype: Any, axes: int, *, summed: bool) -> Array | None:
        chosen = self._chosen(len(x_MD), axes)
        if chosen is None:
            return None
        w, choice = chosen
        how = {"layer": self.layer, "implementation": choice, "summed": summed}
        return few_rows_dense(x_MD, w, dtype=jnp.dtype(dtype), **how)

    def _chosen(self, rows: int, axes: int) -> tuple[Array | Quantized, Choice] | None:
        """The weight as the kernel of few rows reads it, and that choice; None where XLA computes."""
        stacked = self.layer is not None
        if self.kernels == "xla" or rows > MOST_ROWS:
            return None
        if self.kernels == "native":
            choose(OP, f"M{rows} weight of {self.shape}", "native", "cpu", [UNPACKED])
            return None
        assert not isinstance(self.whole, Packed), "packed weights are a CPU's"
        w = flat(self.whole, int(stacked), axes)
        name, blocked = f"{rows} rows, weight of {self.shape}", ["scales shared by numbers that are no neighbors"]
        if w is not None:
            name, blocked = case_name(rows, w), obstacles(w, rows, stacked=stacked)
        choice = choose(OP, name, self.kernels, "cuda", blocked)
        return None if w is None or choice.implementation == "xla" else (w, choice)


def parts_together(x_MD: Array, matrices: Sequence[Matrix], dtype: Any) -> list[Array] | None:
    """Returns ``Matrix.parts`` of the same rows by one launch; None where no GPU's kernel computes all of them.

    Args:
      x_MD: rows.
      matrices: of one layer, not packed.
      dtype: of both factors.
    """
    chosen = [pair for matrix in matrices if (pair := matrix._chosen(len(x_MD), 1)) is not None]
    if len(chosen) < len(matrices):
        return None
    weights, choices = zip(*chosen, strict=True)
    how = {"layer": matrices[0].layer, "implementation": choices[0]}
    return products_of_rows(x_MD, weights, dtype=jnp.dtype(dtype), **how)


def own_of(w: Any) -> Any:
    """Returns a parameter by itself, whether or not it is in a stack."""
    return w.own() if isinstance(w, Matrix) else w
