"""Kernels on a mesh: every device runs one on its part of the operands, its own rows, heads and columns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxspec.nn.policy import Compute
from jaxspec.sharding.axis_rules import RULES, mesh_axes
from pallas_kernels.quantized import Quantized

Over = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Devices:
    """The devices whose parts kernels compute.

    Attributes:
      mesh: with all of its axes, None where every device has all rows, heads and columns.
      row_axes: its axes of several devices that rows are split over.
    """

    mesh: AbstractMesh | None = None
    row_axes: tuple[str, ...] = ()

    def size(self, over: Over) -> int:
        """Returns how many parts axes of the mesh make."""
        axes = (over,) if isinstance(over, str) else over or ()
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    def over_rows(self, rows: int) -> tuple[str, ...] | None:
        """Returns the mesh axes that so many rows are split over, the first of ``row_axes`` that divide them."""
        parts = (self.row_axes[:count] for count in range(len(self.row_axes), 0, -1))
        return next((axes for axes in parts if not rows % self.size(axes)), None)

    def own_rows(self, rows: int) -> int:
        """Returns how many of the rows a device has."""
        return rows // self.size(self.over_rows(rows))

    def over_heads(self, heads: int) -> str | None:
        """Returns the mesh axis that so many heads are split over, None where every device has all."""
        return self.over_weight(("heads",), (heads,))[0]

    def over_weight(self, axes: Sequence[str], shape: Sequence[int]) -> tuple[str | None, ...]:
        """Returns the mesh axis of each axis of a parameter, by its logical axes; None where it is not divided."""
        if self.mesh is None:
            return (None,) * len(axes)
        wanted = mesh_axes(axes, self.mesh, RULES)
        return tuple(None if size % self.size(axis) else axis for axis, size in zip(wanted, shape, strict=True))

    def specs(self, w: Any, axes: Sequence[str | None]) -> Any:
        """Returns how a weight is split, in a tree of its structure; of scales what divides is split like numbers."""
        if self.mesh is None:
            return P()
        if not isinstance(w, Quantized):
            return P(*axes)
        scale = [None if size % self.size(axis) else axis for axis, size in zip(axes, w.scale.shape, strict=True)]
        data_spec: Any = P(*axes)
        scale_spec: Any = P(*scale)
        return Quantized(data_spec, scale_spec, w.format)

    def part(self, w: Any, specs: Any) -> Any:
        """Returns shapes and dtypes of what a device has of a tree of arrays."""
        if self.mesh is None:
            return w

        def one(x: Any, spec: P) -> jax.ShapeDtypeStruct:
            over = (*spec, *[None] * (len(x.shape) - len(spec)))
            own = tuple(n // self.size(axes) for n, axes in zip(x.shape, over, strict=True))
            return jax.ShapeDtypeStruct(own, x.dtype)

        return jax.tree.map(one, w, specs)

    def run(self, compute: Callable[..., Any], operands: tuple[Any, ...], specs: tuple[Any, ...], out: Any) -> Any:
        """Runs ``compute`` on every device with its parts of the operands.

        Args:
          compute: takes the parts, returns a part of the result.
          operands: arrays, or trees of them.
          specs: how each is split.
          out: how the result is.
        """
        if self.mesh is None:
            return compute(*operands)
        return jax.shard_map(compute, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)(*operands)


ONE = Devices()


def devices_of(compute: Compute) -> Devices:
    """Returns the devices over which rows, heads or columns are split, ``ONE`` where none are."""
    return Devices(compute.mesh, compute.row_axes) if compute.splits_operands else ONE
