"""The sharding of every parameter on a mesh, by the logical axes that it declares."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError
from jaxspec.nn.param import declared
from jaxspec.sharding.axis_rules import RULES, mesh_axes
from pallas_kernels.quantized import Quantized


def named_shardings(
    params: Any,
    mesh: Mesh,
    rules: Mapping[str, str] = RULES,
    *,
    allow_replication: bool | Collection[str] = False,
) -> Any:
    """Returns the sharding of every parameter, in a tree of the same structure.

    Args:
      params: parameters, or shapes and dtypes of them. The scales of a quantized weight are split like its numbers
        where their own counts divide, and replicated elsewhere.
      mesh: of devices.
      rules: mesh axis by logical axis, in order of precedence.
      allow_replication: whether a dimension that its mesh axis does not divide is replicated instead of refused, or the
        logical axes of those that are.

    Raises:
      ConfigError: some dimensions are not divided by their mesh axis; all are listed.
    """
    refused: list[str] = []

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Quantized):
            return NamedSharding(mesh, spec_of(path, leaf))
        data = spec_of(path, leaf.data)
        scale = [a if a and _divides(mesh, a, size) else None for a, size in zip(data, leaf.scale.shape, strict=True)]
        return replace(leaf, data=NamedSharding(mesh, data), scale=NamedSharding(mesh, PartitionSpec(*scale)))

    def spec_of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        logical = declared(path).axes_of(len(leaf.shape))
        axes = list(mesh_axes(logical, mesh, rules))
        for index, (axis, size) in enumerate(zip(axes, leaf.shape, strict=True)):
            if axis and not _divides(mesh, axis, size):
                may = allow_replication if isinstance(allow_replication, bool) else logical[index] in allow_replication
                if not may:
                    name = "/".join(str(key) for part in path if (key := getattr(part, "key", None)) is not None)
                    refused.append(f"{name}: {logical[index]} = {size} over {axis} = {mesh.shape[axis]}")
                axes[index] = None
        return PartitionSpec(*axes)

    made = jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    if refused:
        raise ConfigError(
            f"sharding: {len(refused)} dimensions cannot be split evenly: {'; '.join(_first(refused))}. "
            "Choose mesh sizes that divide them, or allow replication; for experts a placement with redundant slots"
            " helps, see jaxspec inspect --balance"
        )
    return made


def _divides(mesh: Mesh, axis: str, size: int) -> bool:
    return size % mesh.shape[axis] == 0


def _first(refused: list[str], most: int = 8) -> list[str]:
    """Returns the first few, and how many there are besides."""
    return refused[:most] + ([f"and {len(refused) - most} more"] if len(refused) > most else [])
