"""Topologies of drafts, the anchor at the root: a static chain or tree, or a tree that every row grows itself."""

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
    def name(self) -> str:
        """Name in tables and metrics: a chain's length, or the number of children by level."""
        if self.is_chain:
            return str(self.drafts)
        levels: list[list[int]] = [[] for _ in range(self.max_depth + 1)]
        for depth, children in zip(self.depth, self.children, strict=True):
            levels[depth].append(len(children))
        equal = all(len(set(counts)) == 1 for counts in levels)
        return str([counts[0] if equal else counts for counts in levels[:-1]]).replace(" ", "")

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
    def write_ahead(self) -> int:
        """Most positions that a drafter writes ahead for it."""
        return self.nodes

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parents == tuple(range(-1, self.nodes - 1))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node in order of preference."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def path_TJ(self) -> np.ndarray:
        """int32 [T, K + 1]: the nodes from the anchor to each node by depth, then zeros."""
        path_TJ = np.zeros((self.nodes, self.max_depth + 1), np.int32)
        for node, parent in enumerate(self.parents[1:], start=1):
            path_TJ[node] = path_TJ[parent]
            path_TJ[node, self.depth[node]] = node
        return path_TJ


@dataclass(frozen=True)
class DynamicTree:
    """A tree that every row grows while it drafts (EAGLE-2, Li 2024, 2406.16858, section 4).

    At each depth the ``top_k`` most confident nodes are expanded into their ``top_k`` best tokens; the ``nodes - 1``
    most confident of all are verified. A node's confidence is the product of the draft's probabilities on its path, so
    no node is verified without its parent.

    Attributes:
      top_k: nodes expanded per depth, and children of each.
      steps: K, depth of the tree.
      nodes: T, positions of one verification, the anchor included.
    """

    top_k: int
    steps: int
    nodes: int

    def __post_init__(self) -> None:
        if self.top_k < 2 or self.steps < 1:
            raise ConfigError(
                f"dynamic tree: at least 2 nodes are expanded per depth, and depths are at least 1; got {self.top_k} "
                f"and {self.steps}"
            )
        most = min(MAX_NODES, 1 + self.top_k + (self.steps - 1) * self.top_k**2)
        if not self.steps < self.nodes <= most:
            raise ConfigError(
                f"dynamic tree: {self.nodes} nodes, but top {self.top_k} at {self.steps} depths give "
                f"{self.steps + 1} to {most}, the anchor included"
            )

    @property
    def drafts(self) -> int:
        """N, the drafted nodes."""
        return self.nodes - 1

    @property
    def name(self) -> str:
        """Name in tables and metrics."""
        return f"top {self.top_k}, {self.steps} deep, {self.nodes} nodes"

    @property
    def max_depth(self) -> int:
        """K, the most drafts that one step can accept."""
        return self.steps

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return False

    @property
    def write_ahead(self) -> int:
        """Most positions that a drafter writes ahead: the anchor and every expanded level, or the accepted path."""
        return max(1 + (self.steps - 1) * self.top_k, self.steps + 1)


AnyTopology = Topology | DynamicTree


def chain(length: int) -> Topology:
    """Returns a chain of K drafts, each the child of the one before; ``chain(0)`` is plain decoding."""
    if length < 0:
        raise ConfigError(f"chain: the speculation length must be at least 0, got {length}")
    return Topology(tuple(range(-1, length)))


PLAIN = chain(0)


def tree(branching: tuple[int, ...]) -> Topology:
    """Returns a full tree: every node of depth d has ``branching[d]`` children, numbered breadth first."""
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
