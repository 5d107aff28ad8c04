"""Which mesh axis each dimension of a parameter is split over, by the letters at the end of the parameter's name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError

# Letters of jaxspec/shapes.py. Where two dimensions of one parameter want the same mesh axis, the letter that stands
# first here gets it and the other dimension is replicated.
RULES: Mapping[str, str] = {"E": "expert", "H": "tensor", "G": "tensor", "F": "tensor", "V": "tensor", "W": "tensor"}
LAYER = "Y"
# Heads and vocabularies of any size are worth a mesh; experts and hidden units are what it is there for.
MAY_BE_WHOLE = "GHVW"
# Small ones that every device needs whole: routers, for every device routes all rows, and tables read by token id.
WHOLE = ("router_DE", "router_bias_E", "choice_bias_E", "table_VA", "slots_EX", "routing_DYE")

Axes = tuple[str, ...]


def logical_axes(path: Sequence[Any], leaf: Any) -> Axes:
    """One letter per dimension of a parameter, ``Y`` first where equal layers are stacked.

    Args:
      path: of the leaf in the tree of parameters, as JAX gives it or as strings; ``kv_b_HXR`` has axes H, X and R,
        and a number behind the letters (``down_FD_7``) counts experts that lie apart.
      leaf: anything with a shape; the parts of a quantised weight have its axes.

    Raises:
      ConfigError: the name's letters do not fit the number of dimensions.
    """
    name = next(name for part in reversed(path) if (name := _key(part)) is not None)
    letters = name.rstrip("0123456789").removesuffix("_") if name.rpartition("_")[2].isdigit() else name
    axes = tuple(letters.rpartition("_")[2])
    rank = len(leaf.shape)
    if rank == len(axes) + 1:
        axes = (LAYER, *axes)
    if rank != len(axes):
        raise ConfigError(
            f"sharding: parameter {name} has {rank} dimensions, but its name ends in {len(axes)} letters; "
            "a parameter's name ends in one letter per axis"
        )
    return axes


def _key(part: Any) -> str | None:
    """A parameter's or module's name; None for the fields of a quantised weight."""
    return part if isinstance(part, str) else getattr(part, "key", None)


def mesh_axes(axes: Axes, mesh: Mesh | AbstractMesh, rules: Mapping[str, str] = RULES) -> tuple[str | None, ...]:
    """Mesh axis of each dimension, None where it is replicated; no mesh axis is named twice.

    Args:
      axes: letters of the dimensions.
      mesh: axes of one device and axes that it lacks split nothing.
      rules: mesh axis by letter, in order of precedence.
    """
    found: list[str | None] = [None] * len(axes)
    taken: set[str] = set()
    for letter, wanted in rules.items():
        if letter in axes and wanted not in taken and mesh.shape.get(wanted, 1) > 1:
            found[axes.index(letter)] = wanted
            taken.add(wanted)
    return tuple(found)


def named_shardings(
    params: Any, mesh: Mesh, rules: Mapping[str, str] = RULES, *, allow_replication: bool | str = False
) -> Any:
    """The sharding of every parameter, in a tree of the same structure.

    Args:
      params: parameters, or shapes and dtypes of them. The scales of a quantised weight are split like its numbers
        where their own counts divide, and replicated elsewhere.
      mesh: of devices.
      rules: mesh axis by letter, in order of precedence.
      allow_replication: whether a dimension that its mesh axis does not divide is replicated instead of refused, or the
        letters of those that are.

    Raises:
      ConfigError: some dimensions are not divided by their mesh axis; all are listed.
    """
    refused: list[str] = []
    may = (lambda letter: allow_replication) if isinstance(allow_replication, bool) else allow_replication.__contains__

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        if not _is_quantized(leaf):
            return NamedSharding(mesh, spec_of(path, leaf))
        data = spec_of(path, leaf.data)
        scale = [a if a and _divides(mesh, a, size) else None for a, size in zip(data, leaf.scale.shape, strict=True)]
        return dataclasses.replace(
            leaf, data=NamedSharding(mesh, data), scale=NamedSharding(mesh, PartitionSpec(*scale))
        )

    def spec_of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        if _key(path[-1]) in WHOLE:
            return PartitionSpec(*[None] * len(leaf.shape))
        letters = logical_axes(path, leaf)
        axes = list(mesh_axes(letters, mesh, rules))
        for place, (axis, size) in enumerate(zip(axes, leaf.shape, strict=True)):
            if axis and not _divides(mesh, axis, size):
                if not may(letters[place]):
                    name = "/".join(key for part in path if (key := _key(part)) is not None)
                    refused.append(f"{name}: {letters[place]} = {size} over {axis} = {mesh.shape[axis]}")
                axes[place] = None
        return PartitionSpec(*axes)

    made = jax.tree_util.tree_map_with_path(one, params, is_leaf=_is_quantized)
    if refused:
        raise ConfigError(
            f"sharding: {len(refused)} dimensions cannot be split evenly: {'; '.join(_first(refused))}. "
            "Choose mesh sizes that divide them, or allow replication; for experts (E) a placement with redundant slots"
            " helps, see jaxspec inspect --balance"
        )
    return made


def _divides(mesh: Mesh, axis: str, size: int) -> bool:
    return size % mesh.shape[axis] == 0


def _first(refused: list[str], most: int = 8) -> list[str]:
    """The first few, and how many there are besides."""
    return refused[:most] + ([f"and {len(refused) - most} more"] if len(refused) > most else [])


def _is_quantized(leaf: Any) -> bool:
    """Whether it is numbers with scales; this room stands below the one that defines their class."""
    return dataclasses.is_dataclass(leaf) and hasattr(leaf, "scale") and hasattr(leaf, "data")
