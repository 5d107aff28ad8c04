"""Where the state of a decoding engine lies on a mesh: rows and heads by the letters of its arrays, the rest whole."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError

T = TypeVar("T")
CACHE = "PGZC"
HEAD_RULES: Mapping[str, tuple[str, ...]] = {"G": ("tensor",)}


def row_axes(mesh: Mesh | AbstractMesh, rows: int, *, spread: bool) -> tuple[str, ...]:
    """Mesh axes that B rows are split over.

    Args:
      mesh: of devices.
      rows: B.
      spread: whether devices along ``expert`` have rows of their own, which they then send to the experts' owners.

    Raises:
      ConfigError: the axis ``data`` does not divide the rows.
    """
    data, expert = mesh.shape.get("data", 1), mesh.shape.get("expert", 1)
    if rows % data:
        raise ConfigError(
            f"mesh: {rows} rows (max_num_seqs) cannot be split evenly over data = {data} devices; "
            f"take a multiple of {data}"
        )
    return ("data", "expert") if spread and rows % (data * expert) == 0 else ("data",)


def state_rules(rows_over: tuple[str, ...], *, own_pages: bool) -> Mapping[str, tuple[str, ...]]:
    """Mesh axes by letter of a decoding state.

    Args:
      rows_over: mesh axes of the rows.
      own_pages: whether page i belongs to row i in every cache; pages of a pool, and those of stacked layers, do not
        lie in the order of the rows and stay whole.
    """
    return {**HEAD_RULES, "B": rows_over, **({"P": rows_over} if own_pages else {})}


def state_shardings(state: Any, mesh: Mesh, rules: Mapping[str, tuple[str, ...]]) -> Any:
    """The sharding of every array of a state, in a tree of the same structure; what does not divide is replicated.

    Args:
      state: arrays, or their shapes. The letters at the end of a field's name are its axes (``history_BS``); arrays of
        four axes without letters are caches.
      mesh: of devices.
      rules: mesh axes by letter, see ``state_rules``.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        axes = [
            _axes(mesh, rules.get(letter, ()), size)
            for letter, size in zip(_letters(path, leaf), leaf.shape, strict=False)
        ]
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(one, state)


def _letters(path: tuple[Any, ...], leaf: Any) -> str:
    """One letter per axis, empty where the name has none."""
    names = [name for part in path if isinstance(name := getattr(part, "name", getattr(part, "key", None)), str)]
    letters = names[-1].rpartition("_")[2] if names else ""
    if len(letters) == len(leaf.shape) and letters.upper() == letters:
        return letters
    return CACHE if len(leaf.shape) == len(CACHE) else ""


def _axes(mesh: Mesh, wanted: tuple[str, ...], size: int) -> tuple[str, ...] | None:
    """The wanted mesh axes of several devices, None if they do not divide the size."""
    several = tuple(axis for axis in wanted if mesh.shape[axis] > 1)
    return several if several and size % math.prod(mesh.shape[axis] for axis in several) == 0 else None


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that some array of a tree lies on, None on one device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def settle(tree: T, mesh: Mesh | None) -> T:
    """The same arrays, those that are not on the mesh yet whole on each of its devices."""
    if mesh is None:
        return tree
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if mesh_of(x) == mesh else jax.device_put(np.asarray(x), whole), tree)


def allocate(make: Callable[[], T], mesh: Mesh | None, rules: Mapping[str, tuple[str, ...]]) -> T:
    """Makes a state where it is to lie; no device holds more of it than its part.

    Args:
      make: allocates it.
      mesh: of devices, None for the default one.
      rules: see ``state_shardings``.
    """
    if mesh is None:
        return make()
    return jax.jit(make, out_shardings=state_shardings(jax.eval_shape(make), mesh, rules))()


def shapes_on(tree: Any, mesh: Mesh | None) -> Any:
    """Shapes, dtypes and places of arrays to compile for; what is not on the mesh is taken as whole on each device."""
    if mesh is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if mesh_of(x) == mesh else whole), tree
    )
