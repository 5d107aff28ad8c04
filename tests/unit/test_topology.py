"""Chains and trees of draft nodes."""

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.topology import MAX_NODES, DynamicTree, Topology, chain, tree


@pytest.mark.parametrize("length", [0, 1, 4])
def test_chain(length: int):
    top = chain(length)
    assert top.is_chain
    assert (top.nodes, top.drafts, top.max_depth) == (length + 1, length, length)
    assert top.depth == tuple(range(length + 1))
    np.testing.assert_array_equal(top.path_TJ, np.tri(length + 1, dtype=int) * np.arange(length + 1))


def test_tree_is_numbered_level_by_level():
    top = tree((2, 3))
    assert top.parents == (-1, 0, 0, 1, 1, 1, 2, 2, 2)
    assert top.depth == (0, 1, 1, 2, 2, 2, 2, 2, 2)
    assert top.children[0] == (1, 2)
    assert top.children[2] == (6, 7, 8)
    assert top.path_TJ[3:].tolist() == [[0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 2, 6], [0, 2, 7], [0, 2, 8]]
    assert not top.is_chain


def test_a_tree_of_one_branch_is_a_chain():
    assert tree((1, 1, 1)) == chain(3)


def test_paths_of_an_uneven_tree():
    top = Topology((-1, 0, 1, 0, 3, 1))
    assert top.path_TJ.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2], [0, 3, 0], [0, 3, 4], [0, 1, 5]]
    assert top.max_depth == 2


def test_topologies_are_values():
    assert hash(chain(3)) == hash(Topology((-1, 0, 1, 2)))
    assert chain(3) != chain(2)


@pytest.mark.parametrize(
    ("parents", "word"),
    [
        ((), "anchor"),
        ((0,), "anchor"),
        ((-1, 1), "before children"),
        ((-1, -1), "before children"),
        ((-1, 0, 3, 1), "before children"),
        (tuple(range(-1, MAX_NODES)), "at most"),
    ],
)
def test_wrong_parents(parents: tuple[int, ...], word: str):
    with pytest.raises(ConfigError, match=word):
        Topology(parents)


def test_wrong_lengths():
    with pytest.raises(ConfigError, match="at least 0"):
        chain(-1)
    for branching in ((), (2, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            tree(branching)


def test_dynamic_trees():
    top = DynamicTree(top_k=3, steps=4, nodes=9)
    assert (top.nodes, top.drafts, top.max_depth, top.is_chain) == (9, 8, 4, False)
    assert top.write_ahead == 1 + 3 * 3
    assert DynamicTree(2, 1, 2).write_ahead == 2
    assert hash(top) == hash(DynamicTree(3, 4, 9))
    assert DynamicTree(8, 3, MAX_NODES).nodes == MAX_NODES
    for wrong, words in (
        ((1, 4, 5), "at least 2"),
        ((3, 0, 4), "at least 1"),
        ((3, 4, 4), "give 5 to 31"),
        ((3, 4, 32), "give 5 to 31"),
        ((8, 3, MAX_NODES + 1), f"give 4 to {MAX_NODES}"),
    ):
        with pytest.raises(ConfigError, match=words):
            DynamicTree(*wrong)
