"""The indexer's kernels: exactly the best places, lower ones of equal scores, in every company."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocks import trying
from pallas_kernels.choose_places.api import OP, choose_places, obstacles
from pallas_kernels.select import UnsupportedKernel
from pallas_kernels.verify_attention.cases import TREE, depths, paths
from pallas_kernels.verify_attention.kernel import Tiles
from pallas_kernels.where import Where

FLOAT32 = jnp.dtype("float32")
ROWS, COUNT, CAPACITY, TOP_K = 3, 5, 80, 9


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks in every loop."""
    monkeypatch.setattr("pallas_kernels.choose_places.kernel.SEARCHED", 16)
    with trying(OP, Tiles(rows=16, block=8)):
        yield


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    """Of which every sum is exact, and many are equal."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def run(q: np.ndarray, weight: np.ndarray, k: np.ndarray, seen: np.ndarray, **where: np.ndarray) -> tuple[Any, Any]:
    call = partial(choose_places, top_k=TOP_K, dtype=FLOAT32, implementation="interpret")
    return jax.tree.map(np.asarray, jax.jit(call)(q, weight, k, seen.astype(np.int32), where=Where(**where)))


def wanted(q_HC: np.ndarray, weight_H: np.ndarray, k_SC: np.ndarray) -> np.ndarray:
    """The best places of one query, ascending."""
    score_S = weight_H @ np.maximum(q_HC @ k_SC.T, 0)
    return np.sort(np.argsort(-score_S, kind="stable")[:TOP_K])


def test_of_equal_scores_lower_places_are_kept():
    q, weight = whole_numbers(0, ROWS, COUNT, 3, 4), whole_numbers(1, ROWS, COUNT, 3)
    k, seen = (
        whole_numbers(2, ROWS, 1, CAPACITY, 4),
        np.array([[1, 9, 10, 11, 33], [48, 64, 65, 79, 80], [0, 2, 8, 40, 99]]),
    )
    place_BTK, count_BT = run(q, weight, k, seen)
    np.testing.assert_array_equal(count_BT, np.minimum(seen, TOP_K))
    for b, t in np.ndindex(ROWS, COUNT):
        count = count_BT[b, t]
        np.testing.assert_array_equal(place_BTK[b, t, :count], wanted(q[b, t], weight[b, t], k[b, 0, : seen[b, t]]))
        assert not place_BTK[b, t, count:].any()


@pytest.mark.served
def test_a_query_chooses_alike_in_every_company():
    rng = np.random.default_rng(3)
    q, weight, k = (
        rng.normal(size=x).astype(np.float32) for x in ((ROWS, COUNT, 3, 12), (ROWS, COUNT, 3), (ROWS, 1, CAPACITY, 12))
    )
    seen = np.array([30, 47, 62])[:, None] + np.arange(COUNT)
    together, _ = run(q, weight, k, seen)
    longer = np.concatenate([k, np.full_like(k, 7)], axis=2)
    np.testing.assert_array_equal(run(q, weight, longer, seen)[0], together)
    for row in range(ROWS):
        for t in range(COUNT):
            own = np.index_exp[row : row + 1, t : t + 1]
            alone, _ = run(q[own], weight[own], k, seen[own], row_B=np.array([row], np.int32))
            np.testing.assert_array_equal(alone[0, 0], together[row, t])


def test_a_node_chooses_what_its_path_chooses_as_a_chain():
    start, nodes = 37, len(TREE)
    q, weight, k = whole_numbers(4, 1, nodes, 3, 4), whole_numbers(5, 1, nodes, 3), whole_numbers(6, 1, 1, CAPACITY, 4)
    start_B, path_TJ = np.array([start], np.int32), paths(TREE)
    place_BTK, _ = run(q, weight, k, start + depths(TREE)[None] + 1, start_B=start_B, path_BTJ=path_TJ[None])
    for node in range(nodes):
        own = [*range(start), *(start + np.unique(path_TJ[node]))]
        np.testing.assert_array_equal(place_BTK[0, node], wanted(q[0, node], weight[0, node], k[0, 0, own]))


@pytest.mark.parametrize(
    ("heads", "width", "cached", "words"),
    [(64, 128, "int8", "int8"), (256, 128, "bfloat16", "256 heads"), (64, 512, "bfloat16", "512 channels"),
     (64, 136, "bfloat16", "leave 8")],
)  # fmt: skip
def test_obstacles_say_what_stands_in_the_way(heads: int, width: int, cached: str, words: str):
    def found(heads: int, width: int, cached: str) -> list[str]:
        return obstacles(heads, jax.ShapeDtypeStruct((1, 1, 64, width), jnp.dtype(cached)), wanted="triton")

    assert found(64, 128, "bfloat16") == []
    (sentence,) = found(heads, width, cached)
    assert words in sentence


def test_shapes_that_do_not_belong_together_are_refused():
    q, weight, k, seen = (
        np.zeros((2, 3, 4, 16)),
        np.zeros((2, 3, 4)),
        np.zeros((2, 1, 8, 16)),
        np.zeros((2, 3), np.int32),
    )
    call = partial(choose_places, top_k=2, dtype=FLOAT32, implementation="xla")
    for arguments, changes, words in (
        ((q, weight, k[..., :8], seen), {}, "one width"),
        ((q, weight, np.zeros((2, 2, 8, 16)), seen), {}, "one head"),
        ((q, weight[:, :2], k, seen), {}, r"weights must be \(2, 3, 4\)"),
        ((q, weight, k, seen), {"top_k": 0}, "at least 1"),
        ((q, weight, k, seen), {"where": Where(path_BTJ=np.zeros((2, 3, 1), np.int32))}, "need start_B"),
    ):
        with pytest.raises(UnsupportedKernel, match=words):
            call(*arguments, **changes)
