"""A static chain or tree of draft nodes, the anchor at the root."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxspec.errors import ConfigError

MAX_NODES = 65


@dataclass(frozen=True)
class Topology:
    """Parents of the T nodes that one target pass verifies.

    Node 0 is the anchor, the last committed token whose successor is not known yet; nodes 1..N are drafts.
    Parents come before children and siblings are ordered by preference, so a chain of K drafts is
    ``parents = (-1, 0, 1, ..., K - 1)`` and plain decoding is the topology of one node.

    Attributes:
      parents: index of each node's parent; -1 for the anchor alone.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ConfigError(f"topology: the first parent must be -1 (the anchor), got {self.parents[:1]}")
        if len(self.parents) > MAX_NODES:
            raise ConfigError(f"topology: {len(self.parents)} nodes, at most {MAX_NODES} are allowed")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ConfigError(f"topology: node {node} has parent {parent}; parents come before children")

    @property
    def nodes(self) -> int:
        """T, the positions of one verification, the anchor included."""
        return len(self.parents)

    @property
    def drafts(self) -> int:
        """N, the drafted nodes."""
        return len(self.parents) - 1

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Distance of each node from the anchor."""
        depth = [0]
        for parent in self.parents[1:]:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @property
    def max_depth(self) -> int:
        """K, the most drafts that one step can accept."""
        return max(self.depth)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parents == tuple(range(-1, self.nodes - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node in order of preference."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            found[parent].append(node)
        return tuple(tuple(c) for c in found)

    @cached_property
    def ancestors_TT(self) -> np.ndarray:
        """Boolean [T, T]: node t sees node s, which is an ancestor or itself."""
        see = np.zeros((self.nodes, self.nodes), bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                see[node] = see[parent]
            see[node, node] = True
        return see

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Root-to-leaf paths, the anchor left out."""
        leaves = [n for n in range(self.nodes) if not self.children[n]]
        out = []
        for leaf in leaves:
            path, node = [], leaf
            while node > 0:
                path.append(node)
                node = self.parents[node]
            out.append(tuple(reversed(path)))
        return tuple(out)


def chain(length: int) -> Topology:
    """K drafts, each the child of the one before; ``chain(0)`` is plain decoding."""
    if length < 0:
        raise ConfigError(f"chain: the speculation length must be at least 0, got {length}")
    return Topology(tuple(range(-1, length)))


def tree(branching: tuple[int, ...]) -> Topology:
    """A full tree: every node of depth d has ``branching[d]`` children, numbered breadth first."""
    if not branching or min(branching) < 1:
        raise ConfigError(f"tree: branching factors must be at least 1, got {branching}")
    parents, level = [-1], [0]
    for width in branching:
        if len(parents) + len(level) * width > MAX_NODES:
            raise ConfigError(f"tree: {branching} has more than {MAX_NODES} nodes, the anchor included; branch less")
        grown = []
        for parent in level:
            for _ in range(width):
                parents.append(parent)
                grown.append(len(parents) - 1)
        level = grown
    return Topology(tuple(parents))
