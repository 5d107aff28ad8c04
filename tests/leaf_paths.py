"""Paths of a static tree from the anchor to its leaves."""

from jaxspec.topology import Topology


def leaf_paths(topology: Topology) -> list[tuple[int, ...]]:
    """The nodes on the way to each leaf, the anchor left out."""
    leaves = [node for node in range(topology.nodes) if not topology.children[node]]
    return [tuple(topology.path_TJ[node, 1 : topology.depth[node] + 1].tolist()) for node in leaves]
