"""A weight used only in matrix products: keeps (stack, index) to avoid slicing out a copy, and picks the kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.native.packing import Packed, unpack
from jaxspec.native.product import product
from jaxspec.nn.devices import ONE, Devices
from jaxspec.nn.policy import Kernels, Weight
from jaxspec.shapes import Array
from pallas_kernels.few_rows_dense.api import MOST_ROWS, OP, case_name, flat, obstacles, products_of_rows
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
      devices: that each compute with their part of it.
      axes: mesh axis that each axis of the weight itself is split over; empty for ``ONE`` device.
    """

    whole: Array | Quantized | Packed
    layer: Array | None
    kernels: Kernels = "xla"
    devices: Devices = ONE
    axes: tuple[str | None, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight itself."""
        return self.whole.shape if self.layer is None else self.whole.shape[1:]

    @property
    def specs(self) -> Any:
        """Says how the weight is split, or its stack, see ``Devices.specs``."""
        return self.devices.specs(self.whole, (*[None] * (self.layer is not None), *self.axes))

    def own(self) -> Array | Quantized:
        """Returns the weight by itself."""
        layer, own = self.layer, self.whole
        if layer is not None:
            own = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, layer, 0, keepdims=False), own)
        return unpack(own) if isinstance(own, Packed) else own

    def product(self, x_MD: Array, dtype: Any, axes: int = 1) -> Array | None:
        """``x_MD`` times the weight by its kernel, float32 [M, ...]; None where XLA computes it.

        Where devices have parts of what is summed, one all-reduce adds up their sums.

        Args:
          x_MD: rows.
          dtype: of both factors.
          axes: how many axes of the weight are contracted.
        """
        if isinstance(self.whole, Packed):
            choose(OP, f"M{x_MD.shape[0]} weight of {self.shape}", "native", "cpu", [])
            return product(x_MD, self.whole, layer=self.layer, dtype=dtype)
        choice = self.choice(self.devices.own_rows(len(x_MD)), axes)
        return None if choice is None else self.multiply(x_MD, dtype, choice, axes)

    def parts(self, x_MD: Array, dtype: Any, axes: int = 1) -> Array | None:
        """The same not yet added up, [S, M, ...], for a kernel that reads it; None where no GPU's kernel computes it.

        What devices have added up is one part.
        """
        choice = self.choice(self.devices.own_rows(len(x_MD)), axes)
        return None if choice is None else self.multiply(x_MD, dtype, choice, axes, summed=False)

    def choice(self, rows: int, axes: int = 1) -> Choice | None:
        """Returns the GPU's kernel by which a device multiplies so many rows of its own, None where XLA does."""
        if self.kernels == "xla" or rows > MOST_ROWS or isinstance(self.whole, Packed):
            return None
        if self.kernels == "native":
            choose(OP, f"M{rows} weight of {self.shape}", "native", "cpu", [UNPACKED])
            return None
        stacked = self.layer is not None
        part = self.devices.part(self.whole, self.specs)
        w = jax.eval_shape(partial(flat, lead=int(stacked), axes=axes), part)
        name, blocked = f"{rows} rows, weight of {self.shape}", ["scales shared by numbers that are no neighbors"]
        if w is not None:
            name, blocked = case_name(rows, w), obstacles(w, rows, stacked=stacked)
        choice = choose(OP, name, self.kernels, "cuda", blocked + self.cut_scales())
        return None if choice.implementation == "xla" else choice

    def multiply(self, x_MD: Array, dtype: Any, choice: Choice, axes: int = 1, *, summed: bool = True) -> Array:
        """Computes what ``product`` does, or where not ``summed`` what ``parts`` does, by a kernel that was chosen."""
        [part_SMX] = _multiplied(x_MD, [self], dtype, choice, axes)
        return added_up(part_SMX) if summed else part_SMX

    def cut_scales(self) -> list[str]:
        """Returns why parts of a quantized weight have no scales of their own; empty if they have."""
        if not isinstance(self.whole, Quantized):
            return []
        stacked, blocks, reasons = int(self.layer is not None), self.whole.format.blocks, []
        counts = self.whole.scale.shape[stacked:]
        for axis, size, block, count in zip(self.axes, self.shape, blocks, counts, strict=False):
            parts = self.devices.size(axis)
            if parts > 1 and count > 1 and size // parts % block:
                reasons.append(f"scales of {block} numbers, and {size} over {parts} devices of the axis {axis}")
        return reasons


def parts_together(x_MD: Array, matrices: Sequence[Matrix], dtype: Any) -> list[Array] | None:
    """Returns ``Matrix.parts`` of the same rows by one launch; None where no GPU's kernel computes all of them.

    Args:
      x_MD: rows.
      matrices: of one layer, none of them packed or cut through its depth.
      dtype: of both factors.
    """
    chosen = [choice for w in matrices if (choice := w.choice(w.devices.own_rows(len(x_MD)))) is not None]
    return None if len(chosen) < len(matrices) else _multiplied(x_MD, matrices, dtype, chosen[0])


def added_up(part_SMX: Array) -> Array:
    """Returns the sum of parts [M, ...], in their order."""
    total = part_SMX[0]
    for part_MX in part_SMX[1:]:
        total = total + part_MX
    return total


def _multiplied(x_MD: Array, matrices: Sequence[Matrix], dtype: Any, choice: Choice, axes: int = 1) -> list[Array]:
    """Returns the parts [S, M, ...] of the rows' products; where devices have parts of a sum, they are added up."""
    first, devices = matrices[0], matrices[0].devices
    stacked, split_sum = int(first.layer is not None), first.axes[0] if first.axes else None
    assert not any(axis for w in matrices for axis in w.axes[1:axes]), (
        "of the axes that are contracted only the first is split"
    )
    over = devices.over_rows(len(x_MD))

    def compute(x_MD: Array, wholes: list[Weight], layer: Array | None) -> list[Array]:
        weights: list[Any] = [flat(whole, stacked, axes) for whole in wholes]  # none is None, or XLA was chosen
        parts = products_of_rows(x_MD, weights, dtype=dtype, layer=layer, implementation=choice)
        if split_sum is not None:
            parts = [lax.psum(added_up(part), split_sum)[None] for part in parts]
        return [
            part.reshape(*part.shape[:2], *whole.shape[stacked + axes :])
            for part, whole in zip(parts, wholes, strict=True)
        ]

    return devices.run(
        compute, (x_MD, [w.whole for w in matrices], first.layer),
        (P(over, split_sum), [w.specs for w in matrices], P()), [P(None, over, *w.axes[axes:]) for w in matrices],
    )  # fmt: skip


def own_of(w: Any) -> Any:
    """Returns a parameter by itself, whether or not it is in a stack."""
    return w.own() if isinstance(w, Matrix) else w
