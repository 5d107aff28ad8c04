"""Attention to chosen entries: the same bits in every company, and what attention to all of them gives."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import StreamSpec
from jaxspec.cache.window import Window
from jaxspec.nn.cached_attention import attend_cached
from jaxspec.nn.chosen import Chosen, mask_of, where_read
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from pallas_kernels.blocks import trying
from pallas_kernels.chosen_attention.api import OP, Recent, chosen_attention
from pallas_kernels.select import SlowKernelWarning, UnsupportedKernel, recording
from pallas_kernels.verify_attention.api import verify_attention
from pallas_kernels.verify_attention.cases import TREE, depths, paths
from pallas_kernels.verify_attention.kernel import Tiles
from pallas_kernels.where import Where

FLOAT32 = jnp.dtype("float32")
ROWS, COUNT, HEADS, WIDTH, VALUES, CAPACITY, MOST = 3, 5, 20, 24, 16, 64, 21
START_B = np.array([50, 31, 12], np.int32)


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Two tiles of heads, several blocks and several pieces."""
    with trying(OP, Tiles(rows=16, block=4, split=8)):
        yield


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def places(seen_BT: np.ndarray, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Random places among those that each query sees, ascending; rubbish after the last."""
    rng = np.random.default_rng(seed)
    place_BTK = np.full((*seen_BT.shape, MOST), CAPACITY - 1, np.int32)
    for at in np.ndindex(seen_BT.shape):
        own = np.sort(rng.permutation(seen_BT[at])[:MOST])
        place_BTK[at][: own.size] = own
    return place_BTK, np.minimum(seen_BT, MOST).astype(np.int32)


def run(
    q: np.ndarray, pages: np.ndarray, count: np.ndarray, place: Any = None, *, dtype: Any = FLOAT32, **how: Any
) -> Any:
    values = VALUES if "recent" not in how else WIDTH
    call = partial(chosen_attention, scale=0.3, dtype=dtype, value_width=values, implementation="interpret")
    return np.asarray(jax.jit(call)(q, pages, count, place, **how))


POSITION_BT = START_B[:, None] + np.arange(COUNT, dtype=np.int32)


@pytest.mark.served
@pytest.mark.parametrize("kind", ["latent", "compressed"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_query_has_the_same_bits_in_every_company(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    q, pages = noise(0, ROWS, COUNT, HEADS, WIDTH), jnp.asarray(noise(1, ROWS, 1, CAPACITY, WIDTH)).astype(dtype)
    ring, sinks_H = jnp.asarray(noise(2, ROWS, 1, 16, WIDTH)).astype(dtype), np.linspace(-1, 2, HEADS, dtype=np.float32)
    place, count = places((POSITION_BT + 1) // (1 if kind == "latent" else 2))

    def given(own: Any) -> dict[str, Any]:
        more = {"dtype": jnp.dtype(dtype)}
        if kind == "latent":
            return more
        return more | {"recent": Recent(ring, POSITION_BT[own], 9), "sinks_H": sinks_H}

    everything = np.index_exp[:, :]
    together = run(q, pages, count, place, **given(everything))
    assert np.isfinite(together).all()
    longer = jnp.concatenate([pages, 9 * jnp.ones_like(pages)], axis=2)
    np.testing.assert_array_equal(run(q, longer, count, place, **given(everything)), together)
    for row in range(ROWS):
        for t in range(COUNT):
            own = np.index_exp[row : row + 1, t : t + 1]
            alone = run(
                q[own], pages, count[own], place[own], where=Where(row_B=np.array([row], np.int32)), **given(own)
            )
            np.testing.assert_array_equal(alone[0, 0], together[row, t], err_msg=f"row {row}, position {t}")
    monkeypatch.setattr("pallas_kernels.verify_attention.api.PIECES_BYTES", 2 * 4 * 4 * ROWS * HEADS * WIDTH)
    np.testing.assert_array_equal(run(q, pages, count, place, **given(everything)), together)


@pytest.mark.served
def test_a_node_has_the_bits_that_its_path_has_as_a_chain():
    nodes, path_TJ = len(TREE), paths(TREE)
    q, pages = noise(3, ROWS, nodes, HEADS, WIDTH), noise(4, ROWS, 1, CAPACITY, WIDTH)
    place, count = places(START_B[:, None] + depths(TREE) + 1)
    together = run(q, pages, count, place, where=Where(START_B, path_TJ[None]))
    for node in range(nodes):
        path = np.unique(path_TJ[node])
        for row, start in enumerate(START_B):
            chain, own = pages.copy(), np.index_exp[row : row + 1, node : node + 1]
            chain[row, 0, start : start + len(path)] = pages[row, 0, start + path]
            alone = run(q[own], chain, count[own], place[own], where=Where(row_B=np.array([row], np.int32)))
            np.testing.assert_array_equal(alone[0, 0], together[row, node], err_msg=f"row {row}, node {node}")


def test_all_entries_are_what_attention_without_a_choice_sees():
    q, pages = noise(6, ROWS, COUNT, HEADS, WIDTH), noise(7, ROWS, 1, CAPACITY, WIDTH)
    whole = verify_attention(
        q, pages, None, POSITION_BT, scale=0.3, dtype=FLOAT32, value_width=VALUES, block=8, implementation="interpret"
    )
    np.testing.assert_allclose(run(q, pages, POSITION_BT + 1), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tree", [False, True])
def test_what_no_kernel_reads_is_masked(tree: bool):
    """Entries of a dtype that kernels do not know, where an indexer's kernel has chosen."""
    stream, count = StreamSpec(1, WIDTH), len(TREE) if tree else COUNT
    position_BT = START_B[:, None] + (depths(TREE) if tree else np.arange(COUNT)).astype(np.int32)
    place, counts = places(position_BT + 1)
    window = Window(START_B, path_BTJ=paths(TREE)[None] if tree else None, block=8)
    q, pages = noise(8, ROWS, count, HEADS, WIDTH), jnp.asarray(noise(9, ROWS, 1, CAPACITY, WIDTH), jnp.float8_e5m2)
    inputs = Inputs(position_BT, position_BT, window, {}, Chosen(place, counts))
    kept = np.asarray(mask_of(inputs.selection, pages, stream, window)).reshape(ROWS, count, CAPACITY)
    for b, t in np.ndindex(ROWS, count):
        np.testing.assert_array_equal(np.flatnonzero(kept[b, t]), place[b, t, : counts[b, t]])
    policy, how = make_policy(FLOAT32, kernels="interpret"), {"scale": 0.3, "value_width": VALUES}
    with recording() as choices:
        masked = attend_cached(q, (pages, None), inputs, stream, policy, **how)
    assert {choice.op: choice.implementation for choice in choices} == {OP: "xla", "verify_attention": "xla"}
    assert "float8_e5m2" in choices[0].reason
    wanted = run(q, pages.astype(FLOAT32), counts, place, where=where_read(stream, window))
    np.testing.assert_allclose(masked, wanted, rtol=0, atol=1e-5)


def test_shapes_that_do_not_belong_together_are_refused():
    q, k, count = np.zeros((2, 3, 4, 16)), np.zeros((2, 1, 8, 16)), np.zeros((2, 3), np.int32)
    call = partial(chosen_attention, scale=1.0, dtype=FLOAT32, implementation="xla")
    for arguments, changes, words in (
        ((q, k[..., :8], count, None), {}, "one width"),
        ((q, k.reshape(1, 2, 8, 16), count, None), {}, "one head"),
        ((q, k, count, None), {"value_width": 17}, "values of 17"),
        ((q, k, count[:1], None), {}, r"begin with \(2, 3\)"),
        ((q, k, count, count[:1, :, None]), {}, r"begin with \(2, 3\)"),
        ((q, k, count, None), {"where": Where(path_BTJ=count[..., None])}, "need start_B"),
        ((q, k, count, None), {"where": Where(table_BJ=count), "recent": Recent(k, count, 4)}, "no page table"),
    ):
        with pytest.raises(UnsupportedKernel, match=words):
            call(*arguments, **{"value_width": 16, **changes})
    with pytest.warns(SlowKernelWarning, match="int8"):
        chosen_attention(
            q, k.astype(np.int8), count + 1, None, scale=1.0, dtype=FLOAT32, value_width=16, implementation="interpret"
        )
