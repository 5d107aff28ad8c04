"""What every device computes for its own rows alone, where XLA would bring the rows of all devices together."""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from jaxspec.nn.policy import Policy
from jaxspec.shapes import Array
from jaxspec.sharding.placement import row_axes


def on_own_rows(compute: Callable[[Array], Array], policy: Policy, x_X: Array) -> Array:
    """``compute`` of an array whose first axis are rows, or a row's nodes behind each other, which it treats alike.

    Args:
      compute: keeps the first axis.
      policy: knows how a mesh splits rows.
      x_X: rows; those that the mesh does not divide, such as a prompt's, are computed as XLA likes.
    """
    mesh, rows = policy.compute.mesh, x_X.shape[0]
    if mesh is None or not policy.compute.splits_rows or rows % mesh.shape.get("data", 1):
        return compute(x_X)
    spec = P(row_axes(mesh, rows, policy.compute.transport != "sum"))
    return jax.shard_map(compute, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x_X)
