"""Dynamic trees: the nodes that EAGLE-2 keeps, in every row its own, and well-formed whatever the scores."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.draft_scores import DraftScores
from jaxspec.draft.growth import grown, growth_of
from jaxspec.keys import Purpose
from jaxspec.nn.draw import Noise
from jaxspec.protocol import Proposal, Tree
from jaxspec.topology import DynamicTree, Topology, tree

ROWS, VOCAB = 4, 11
NOISE = Noise(jnp.ones((ROWS, 2), jnp.uint32), jnp.ones((ROWS, 1), jnp.int32), jnp.ones(ROWS, bool), Purpose.TARGET)
Path = tuple[int, ...]


def scores_of(row: int, path: Path, sharpness: float = 2.0) -> np.ndarray:
    rng = np.random.default_rng([row, len(path), *path])
    return rng.normal(0, sharpness * (1 + row), VOCAB).astype(np.float32)


def drafted(top, score=scores_of, keep: bool = False) -> tuple[Proposal, list[set[Path]]]:
    """What is proposed, and the nodes whose children were asked for in each row."""
    growth, paths = growth_of(top, ROWS), [[()] for _ in range(ROWS)]
    asked = [set() for _ in range(ROWS)]
    for _ in range(top.max_depth):
        score_BLV = jnp.asarray([[score(row, path) for path in paths[row]] for row in range(ROWS)])
        for row in range(ROWS):
            asked[row] |= set(paths[row])
        noise = NOISE if keep and isinstance(top, DynamicTree) else None  # which must not be looked at then
        found = DraftScores(jax.nn.log_softmax(score_BLV) if keep else score_BLV, noise=noise)
        token_BM, place_BM = growth.grow(found, drawn=keep)
        chosen = [list(zip(*x, strict=True)) for x in zip(token_BM.tolist(), place_BM.tolist(), strict=True)]
        paths = [[(*paths[row][place], token) for token, place in chosen[row]] for row in range(ROWS)]
    return growth.finish(jnp.arange(ROWS) > 0), asked


def nodes_of(token_N: np.ndarray, parent_T: np.ndarray) -> list[Path]:
    """Tokens on the way to each node, checked to come behind its parent's."""
    found: list[Path] = [()]
    for node, parent in enumerate(parent_T[1:], start=1):
        assert 0 <= parent < node
        found.append((*found[parent], int(token_N[node - 1])))
    return found


def reference(row: int, top: DynamicTree, score=scores_of) -> tuple[dict[Path, float], set[Path]]:
    """EAGLE-2 as the paper words it: expand the best of each depth, then keep the best of everything."""
    confidence, level, expanded = {(): 0.0}, [()], set()
    for _ in range(top.steps):
        found = {}
        for path in level:
            expanded.add(path)
            logits = score(row, path).astype(np.float64)
            logp = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            for token in np.argsort(-logp)[: top.top_k]:
                found[(*path, int(token))] = confidence[path] + logp[token]
        confidence |= found
        level = sorted(found, key=lambda path: -found[path])[: top.top_k]
    best = sorted(confidence, key=lambda path: -confidence[path])[: top.nodes]
    return {path: confidence[path] for path in best}, expanded


@pytest.mark.parametrize(
    ("top", "keep"),
    [(DynamicTree(3, 4, 9), False), (DynamicTree(3, 4, 9), True), (DynamicTree(4, 2, 21), False)],
    ids=["scores", "distributions", "everything"],
)
def test_the_most_confident_nodes_are_kept(top: DynamicTree, keep: bool):
    proposal, asked = drafted(top, keep=keep)
    assert proposal.logp_BNV is None, "nodes are chosen and not drawn"
    assert np.asarray(proposal.valid_BN).tolist() == [[row > 0] * top.drafts for row in range(ROWS)]
    grown_tree = proposal.tree_of(top)
    shapes = set()
    for row in range(ROWS):
        parent_T, token_N = np.asarray(grown_tree.parent_BT)[row], np.asarray(proposal.token_BN)[row]
        nodes = nodes_of(token_N, parent_T)
        wanted, expanded = reference(row, top)
        assert set(nodes) == set(wanted)
        assert asked[row] == expanded
        depth = [len(path) for path in nodes]
        assert depth == sorted(depth), "level by level"
        for parent in nodes:
            siblings = [wanted[path] for path in nodes if path and path[:-1] == parent]
            assert siblings == sorted(siblings, reverse=True), "siblings in order of confidence"
        static = Topology(tuple(parent_T.tolist()))
        np.testing.assert_array_equal(np.asarray(grown_tree.depth_BT)[row], static.depth)
        path_TJ = np.asarray(grown_tree.path_BTJ)[row]
        np.testing.assert_array_equal(path_TJ[:, : static.max_depth + 1], static.path_TJ)
        assert not path_TJ[:, static.max_depth + 1 :].any()
        shapes.add(static)
    if top.nodes == 9:
        assert len(shapes) == ROWS, "every row grows its own"


@pytest.mark.parametrize("score", [0.0, 80.0, -np.inf], ids=["equal", "sure", "few known tokens"])
def test_nodes_keep_their_parents_where_confidences_are_equal(score: float):
    """Equal scores tie everywhere; one sure token ties with its own parent; unknown tokens have no probability."""

    def scores(row: int, path: Path) -> np.ndarray:
        found = np.full(VOCAB, -np.inf if score < 0 else 0.0, np.float32)
        found[: 1 + row % 2] = max(score, 0.0)
        return found

    proposal, _ = drafted(DynamicTree(3, 4, 12), scores)
    assert proposal.tree is not None
    for token_N, parent_T in zip(np.asarray(proposal.token_BN), np.asarray(proposal.tree.parent_BT), strict=True):
        nodes = nodes_of(token_N, parent_T)
        assert len(set(nodes)) == 12
        assert max(map(max, nodes[1:])) < VOCAB


def test_a_static_tree_takes_the_best_tokens_behind_each_node():
    top = Topology((-1, 0, 0, 0, 1, 3, 3, 5))
    proposal, _ = drafted(top, keep=True)
    for row in range(ROWS):
        nodes = nodes_of(np.asarray(proposal.token_BN)[row], np.asarray(top.parents))
        for node, parent in enumerate(top.parents[1:], start=1):
            score = scores_of(row, nodes[parent])
            assert nodes[node][-1] == np.argsort(-score)[top.children[parent].index(node)]
            np.testing.assert_allclose(np.asarray(proposal.logp_BNV)[row, node - 1], jax.nn.log_softmax(score))


@pytest.mark.parametrize("top", [tree((2, 2)), Topology((-1, 0, 1, 0, 3, 1))], ids=["full", "uneven"])
def test_depths_and_paths_follow_from_parents(top: Topology):
    found, wanted = grown(jnp.asarray([top.parents], jnp.int32), top.max_depth), Tree.of(top)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_tree_from_one_block_has_the_most_probable_prefixes():
    """DDTree (2604.12989): where all nodes of a depth share a distribution, the best first by a heap."""
    top = DynamicTree(top_k=11, steps=4, nodes=12)
    growth, depths = growth_of(top, ROWS), range(top.max_depth)
    score_BKV = np.stack([[scores_of(row, (depth,)) for depth in depths] for row in range(ROWS)])
    for depth in depths:
        growth.grow(DraftScores(jnp.asarray(score_BKV)).level(depth), drawn=False)
    proposal = growth.finish(jnp.ones(ROWS, bool))
    assert proposal.tree is not None
    logp_BKV = np.asarray(jax.nn.log_softmax(score_BKV), np.float64)
    for row in range(ROWS):
        order_KV = np.argsort(-logp_BKV[row], axis=1)
        heap, best = [(-logp_BKV[row, 0, order_KV[0, 0]], (0,))], set()
        while len(best) < top.drafts:
            weight, ranks = heapq.heappop(heap)
            best.add(tuple(int(order_KV[d, r]) for d, r in enumerate(ranks)))
            d, r = len(ranks) - 1, ranks[-1]
            if r + 1 < VOCAB:
                step = logp_BKV[row, d, order_KV[d, r]] - logp_BKV[row, d, order_KV[d, r + 1]]
                heapq.heappush(heap, (weight + step, (*ranks[:-1], r + 1)))
            if d + 1 < top.max_depth:
                heapq.heappush(heap, (weight - logp_BKV[row, d + 1, order_KV[d + 1, 0]], (*ranks, 0)))
        parent_T = np.asarray(proposal.tree.parent_BT)[row]
        assert set(nodes_of(np.asarray(proposal.token_BN)[row], parent_T)[1:]) == best
