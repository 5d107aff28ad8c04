"""The indexer: its scores and selections are those of a plain transcription, over whatever holds the keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize, init_layer, write
from jaxspec.cache.window import Window
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.nn.rope import RopeSpec
from jaxspec.nn.selection import best, scores
from jaxspec.nn.sparse_index import STREAM, Indexer, IndexSpec, select_among_themselves, select_positions
from jaxspec.topology import Topology

BLOCK, ROOM, DIM, RANK, TOP_K = 8, 48, 20, 10, 6
FLOAT32 = jnp.dtype("float32")
EXACT = make_policy(FLOAT32)


def indexer(interleaved: bool) -> tuple[Indexer, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    module = Indexer(IndexSpec(3, 12, TOP_K, RopeSpec(1e4, 8, interleaved)), DIM, EXACT)
    shapes = {
        "q_RHC": (RANK, 3, 12), "k_DC": (DIM, 12), "k_norm_C": (12,), "k_norm_bias_C": (12,), "weight_DH": (DIM, 3)
    }  # fmt: skip
    return module, {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def inputs(rows: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x, low = (rng.normal(size=(rows, count, width)).astype(np.float32) for width in (DIM, RANK))
    return x, low, np.tile(np.arange(count, dtype=np.int32), (rows, 1))


def turned(x_THC: np.ndarray, interleaved: bool) -> np.ndarray:
    """The first 8 channels of position t rotated by t times their frequencies."""
    out = x_THC.copy()
    for t, pair in np.ndindex(len(x_THC), 4):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
        angle = t * 1e4 ** (-2 * pair / 8)
        out[t, :, a] = x_THC[t, :, a] * np.cos(angle) - x_THC[t, :, b] * np.sin(angle)
        out[t, :, b] = x_THC[t, :, b] * np.cos(angle) + x_THC[t, :, a] * np.sin(angle)
    return out


def transcribed(params: dict, x_TD: np.ndarray, low_TR: np.ndarray, interleaved: bool) -> np.ndarray:
    """Scores of one row in double precision; what lies behind a query scores minus infinity."""
    p = {name: value.astype(np.float64) for name, value in params.items()}
    k_TC = x_TD @ p["k_DC"]
    k_TC = (k_TC - k_TC.mean(-1, keepdims=True)) / np.sqrt(k_TC.var(-1, keepdims=True) + 1e-6)
    k_TC = turned((k_TC * p["k_norm_C"] + p["k_norm_bias_C"])[:, None], interleaved)[:, 0]
    q_THC = turned(np.einsum("tr,rhc->thc", low_TR, p["q_RHC"]), interleaved)
    weight_TH = x_TD @ p["weight_DH"] * 3**-0.5
    found = np.full((len(x_TD), len(x_TD)), -np.inf)
    for t in range(len(x_TD)):
        for s in range(t + 1):
            found[t, s] = sum(weight_TH[t, h] * max(q_THC[t, h] @ k_TC[s] * 12**-0.5, 0) for h in range(3))
    return found


def chosen(score_TS: np.ndarray, top_k: int = TOP_K) -> np.ndarray:
    """The best positions of each query; of equal scores the lower position comes first."""
    kept = np.zeros(score_TS.shape, bool)
    for t, score_S in enumerate(score_TS):
        kept[t, np.argsort(-score_S, kind="stable")[:top_k]] = True
    return kept & (score_TS > -np.inf)


def random_queries(rows: int, count: int, seed: int = 3) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries of 3 heads, their weights and one key each, small whole numbers: every sum is exact and many tie."""
    rng = np.random.default_rng(seed)
    q, weight, k = (rng.integers(-2, 3, shape) for shape in ((rows, count, 3, 4), (rows, count, 3), (rows, count, 4)))
    return jnp.asarray(q, jnp.float32), jnp.asarray(weight, jnp.float32), jnp.asarray(k, jnp.float32)


SMALL = IndexSpec(3, 4, TOP_K, RopeSpec(1e4, 4))


def exact_scores(q_THC, weight_TH, k_TC) -> np.ndarray:
    score_TS = np.einsum("th,ths->ts", weight_TH, np.maximum(np.einsum("thc,sc->ths", q_THC, k_TC), 0))
    return np.where(np.tri(len(k_TC), dtype=bool), score_TS, -np.inf)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_selections_equal_a_plain_transcription(interleaved: bool, cached: bool):
    module, params = indexer(interleaved)
    x_BTD, low_BTR, position_BT = inputs(2, 30)
    cache, window = None, None
    if cached:
        cache = init_layer({STREAM: module.spec.stream}, CacheSize(2, ROOM, 30, BLOCK), FLOAT32)
        window = Window(jnp.zeros(2, jnp.int32), block=BLOCK)
    kept_BTS, _ = jax.jit(module.apply)(
        {"params": params}, x_BTD, low_BTR, Inputs(position_BT, position_BT, window, cache)
    )
    for row in range(2):
        score_TS = transcribed(params, x_BTD[row], low_BTR[row], interleaved)
        cut = np.sort(score_TS, axis=-1)[TOP_K:, -TOP_K - 1 : -TOP_K + 1]
        gap = np.diff(cut)
        assert ((gap == 0) | (gap > 1e-5)).all(), "no near ties that rounding could swap; zeros tie exactly"
        seen_TS = np.isfinite(score_TS)
        np.testing.assert_array_equal(np.asarray(kept_BTS)[row, :, :30] & seen_TS, chosen(score_TS))


def test_equal_scores_keep_the_lower_positions():
    score_S = jnp.asarray([0.0, 2.0, 0.0, -1.0, 2.0, 0.0, 2.0])
    for top_k, kept in ((2, [1, 4]), (4, [0, 1, 4, 6]), (6, [0, 1, 2, 4, 5, 6])):
        np.testing.assert_array_equal(np.flatnonzero(best(score_S[None, None], top_k)), kept)


def test_zero_scores_tie_whatever_the_sign_of_their_weights():
    """Both heads of every key are hidden by the relu; negative weights would make their zeros negative."""
    q_THC, k_ZC = jnp.ones((1, 1, 2, 4)), -jnp.ones((1, 5, 4)).at[0, 3].set(-1.0)
    score = jax.jit(lambda w: scores((q_THC, w), k_ZC, FLOAT32))
    assert not np.signbit(score(jnp.asarray([[[-1.0, -2.0]]])))[0, 0, :3].any()
    kept = best(score(jnp.asarray([[[1.0, 1.0]]])), 2)
    np.testing.assert_array_equal(np.flatnonzero(kept), [0, 3])


@pytest.mark.parametrize("count", [70, 64, 7])
def test_whole_sequences_select_as_transcribed(count: int):
    q, weight, k = random_queries(2, count)
    kept_BTS = jax.jit(lambda *a: select_among_themselves(a[:2], a[2], TOP_K, FLOAT32))(q, weight, k)
    for row in range(2):
        np.testing.assert_array_equal(kept_BTS[row], chosen(exact_scores(q[row], weight[row], k[row])))


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("paged", [False, True])
def test_cached_keys_are_selected_as_transcribed(count: int, paged: bool):
    q, weight, k = random_queries(2, 40)
    table_BJ = jnp.asarray([[5, 2, 0], [1, 4, 3]], jnp.int32) if paged else None
    pool = (6, 16) if paged else None
    pages = init_layer({STREAM: SMALL.stream}, CacheSize(2, ROOM, count, BLOCK, pool), FLOAT32)[STREAM]

    @jax.jit
    def run(pages, q, weight, k, start_B):
        window = Window(start_B, table_BJ, block=BLOCK)
        pages = write(pages, SMALL.stream, window, k[:, :, None])
        position_BT = start_B[:, None] + jnp.arange(count, dtype=jnp.int32)
        return pages, select_positions((q, weight), position_BT, pages, SMALL, window, EXACT)

    for at in range(0, 40, count):
        part = slice(at, at + count)
        pages, kept_BTS = run(pages, q[:, part], weight[:, part], k[:, part], jnp.full(2, at, jnp.int32))
        assert kept_BTS.shape == (2, count, ROOM)
        for row in range(2):
            score_TS = exact_scores(q[row], weight[row], k[row])[part]
            seen_TS = np.isfinite(score_TS)
            np.testing.assert_array_equal(np.asarray(kept_BTS)[row, :, :40] & seen_TS, chosen(score_TS))


def test_tree_nodes_select_among_their_ancestors():
    top, start = Topology((-1, 0, 0, 1, 2, 3)), 13
    q, weight, k = random_queries(1, start + top.nodes)
    pages = init_layer({STREAM: SMALL.stream}, CacheSize(1, ROOM, start + top.nodes, BLOCK), FLOAT32)[STREAM]

    pages = write(pages, SMALL.stream, Window(jnp.zeros(1, jnp.int32), block=BLOCK), k[:, :, None])
    window = Window(jnp.full(1, start, jnp.int32), path_BTJ=top.path_TJ[None], block=BLOCK)
    position_BT = start + jnp.asarray(top.depth, jnp.int32)[None]
    kept_XTS = select_positions((q[:, start:], weight[:, start:]), position_BT, pages, SMALL, window, EXACT)
    assert kept_XTS.shape == (top.nodes, 1, ROOM)
    for node in range(top.nodes):
        path = [*range(start), *(start + np.unique(top.path_TJ[node]))]
        score_S = exact_scores(*(np.asarray(a)[0, path] for a in (q, weight, k)))[-1:]
        kept = np.asarray(kept_XTS)[node, :, : len(path)]
        np.testing.assert_array_equal(kept, chosen(score_S), err_msg=f"node {node}")


def test_scores_are_not_computed_where_everything_is_kept():
    q, weight, k = random_queries(1, 4)
    pages = init_layer({STREAM: SMALL.stream}, CacheSize(1, BLOCK, 4, BLOCK), FLOAT32)[STREAM]
    assert select_among_themselves((q, weight), k, 4, FLOAT32) is None
    window, position_BT = Window(jnp.zeros(1, jnp.int32), block=BLOCK), jnp.arange(4, dtype=jnp.int32)[None]
    small = IndexSpec(3, 4, BLOCK, SMALL.rope)
    assert select_positions((q, weight), position_BT, pages, small, window, EXACT) is None
    # Keys that are no numbers would show in any score; the cache is longer than top_k, the context is not.
    kept = select_positions((q, weight), position_BT, pages * jnp.nan, SMALL, window, EXACT)
    assert kept is not None
    assert bool(kept.all())


@pytest.mark.served
def test_decoding_needs_no_array_of_all_pairs_of_positions():
    spec, room = IndexSpec(8, 32, 64, RopeSpec(1e4, 32)), 4096
    pages = jax.ShapeDtypeStruct((1, 1, room, 32), FLOAT32)
    q, weight = jax.ShapeDtypeStruct((1, 2, 8, 32), FLOAT32), jax.ShapeDtypeStruct((1, 2, 8), FLOAT32)

    def step(q, weight, pages, start_B):
        position_BT = start_B[:, None] + jnp.arange(2, dtype=jnp.int32)
        return select_positions((q, weight), position_BT, pages, spec, Window(start_B), EXACT)

    compiled = jax.jit(step).lower(q, weight, pages, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
    used = compiled.memory_analysis()
    assert used is not None
    assert used.temp_size_in_bytes < 100 * room
