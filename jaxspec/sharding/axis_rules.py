"""Which mesh axis each logical axis of a parameter is split over."""

from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh

# Where two dimensions of one parameter want the same mesh axis, the name that stands first here gets it and the other
# dimension is replicated. Axes without a rule are replicated: a router's, for instance, for every device routes all
# rows. As Flax's logical axis rules: ``tuple(RULES.items())``.
RULES: Mapping[str, str] = {
    "expert": "expert",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "draft_vocab": "tensor",
}
# Heads and vocabularies of any size are worth a mesh; experts and hidden units are what it is there for.
REPLICABLE = ("heads", "kv_heads", "vocab", "draft_vocab")


def mesh_axes(
    axes: Sequence[str], mesh: Mesh | AbstractMesh, rules: Mapping[str, str] = RULES
) -> tuple[str | None, ...]:
    """Returns the mesh axis of each dimension, None where it is replicated; no mesh axis is named twice.

    Args:
      axes: logical names of the dimensions.
      mesh: axes of one device and axes that it lacks split nothing.
      rules: mesh axis by logical axis, in order of precedence.
    """
    split: list[str | None] = [None] * len(axes)
    taken: set[str] = set()
    for name, axis in rules.items():
        if name in axes and axis not in taken and mesh.shape.get(axis, 1) > 1:
            split[axes.index(name)] = axis
            taken.add(axis)
    return tuple(split)
