"""Top-k, top-p and min-p against a sorted vocabulary in float64, for ties, bans, edges and any number of rows."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import init_sampling
from jaxspec.native.build import compiler
from jaxspec.native.product import kernels
from jaxspec.nn.threshold import search_by_kernel, search_four_bits_at_once, search_one_by_one
from jaxspec.protocol import Sampling
from jaxspec.pytree import replace
from jaxspec.verify.logits import truncate, truncate_by_kernel, truncate_by_search

VOCAB = 129
TOP_K = (0, 1, 2, 17, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1)
TOP_P = (1e-6, 0.1, 0.5, 0.9, 0.999, 1.0)
MIN_P = (0.0, 0.05)
run = jax.jit(truncate)


def draws() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(0, 2, VOCAB).astype(np.float32)
    banned = rng.random(VOCAB) < 0.7
    return {
        "scores": x,
        "huge temperature": x / np.float32(1e4),
        "small temperature": x / np.float32(1e-3),
        "ties": np.round(x),
        "all equal": np.full(VOCAB, -3, np.float32),
        "zeros of both signs": np.where(x > 3, x, np.where(x > 0, 0, -0.0)).astype(np.float32),
        "some banned": np.where(banned, -np.inf, x).astype(np.float32),
        "one left": np.where(np.arange(VOCAB) == 5, x, -np.inf).astype(np.float32),
        "none left": np.full(VOCAB, -np.inf, np.float32),
    }


def settings(top_k: list[int], top_p: list[float], min_p: list[float]) -> Sampling:
    changes = {"top_k_B": jnp.asarray(top_k, jnp.int32)}
    changes |= {"top_p_B": jnp.asarray(top_p, jnp.float32), "min_p_B": jnp.asarray(min_p, jnp.float32)}
    return replace(init_sampling(len(top_k), 1), **changes)


def by_sorting(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens are kept."""
    x = x.astype(np.float64)
    if np.isneginf(x.max()):
        return np.zeros(len(x), bool)
    x = np.where(np.exp(x - x.max()) < min_p, -np.inf, x)
    if 0 < top_k < len(x):
        x = np.where(x < np.sort(x)[::-1][top_k - 1], -np.inf, x)
    if top_p < 1:
        ranked = np.sort(x)[::-1]
        prob = np.exp(ranked - ranked[0])
        prob /= prob.sum()
        before = np.cumsum(prob) - prob
        x = np.where(x < ranked[before < top_p].min(), -np.inf, x)
    return ~np.isneginf(x)


@pytest.mark.parametrize("kind", draws())
def test_keeps_what_sorting_keeps(kind: str):
    x, cuts = draws()[kind], list(product(TOP_K, TOP_P, MIN_P))
    kept = np.asarray(run(jnp.tile(x, (len(cuts), 1, 1)), settings(*map(list, zip(*cuts, strict=True)))))[:, 0]
    for row, cut in enumerate(cuts):
        wanted = np.where(by_sorting(x, *cut), x, -np.inf).astype(np.float32)
        np.testing.assert_array_equal(kept[row].view(np.uint32), wanted.view(np.uint32), err_msg=str(cut))


@pytest.mark.parametrize("kind", draws())
def test_the_kernel_keeps_what_xla_keeps(kind: str):
    if compiler() is None:
        pytest.skip("no C compiler")
    assert kernels().handle is not None, kernels().reason
    x, cuts = draws()[kind], list(product(TOP_K, TOP_P, MIN_P))
    given = jnp.tile(x, (len(cuts), 2, 1)), settings(*map(list, zip(*cuts, strict=True)))
    one, other = (np.asarray(jax.jit(way)(*given)) for way in (truncate_by_kernel, truncate_by_search))
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_all_searches_find_the_same():
    rng = np.random.default_rng(1)
    bits = rng.integers(-(2**31), 2**31, (2, 3, VOCAB), dtype=np.int64).astype(np.int32)
    bits[:, 1] //= 2**27  # ties
    bits[0, 2] //= 2**16
    weight = rng.integers(0, 9, bits.shape).astype(np.int32)
    for least in (1, 60, 10**6):
        given = jnp.asarray(bits.view(np.float32)), jnp.asarray(weight), jnp.full((2, 3), least, jnp.int32)
        wanted = np.asarray(jax.jit(search_one_by_one)(*given)).view(np.uint32)
        for search in (search_four_bits_at_once, *([search_by_kernel] if kernels().handle else [])):
            np.testing.assert_array_equal(np.asarray(jax.jit(search)(*given)).view(np.uint32), wanted)


@pytest.mark.served
def test_a_row_is_cut_as_it_is_alone():
    """Where rounding decides: each p is what the tokens down to some rank sum to, as float32 has it."""
    rows, vocab = 24, 49152
    rng = np.random.default_rng(0)
    x = rng.normal(0, 0.5, (rows, 2, vocab)).astype(np.float32)
    prob = np.exp(-np.sort(-x[:, 0].astype(np.float64)))
    reached = np.cumsum(prob / prob.sum(axis=1, keepdims=True), axis=1)
    top_p = reached[np.arange(rows), rng.integers(100, vocab - 100, rows)].tolist()
    top_k = np.where(np.arange(rows) % 8 == 1, 48000, 0).tolist()
    given = jnp.asarray(x), settings(top_k, top_p, [0] * rows)
    together = np.asarray(run(*given))
    kept, by_xla = (np.isfinite(y).sum(axis=-1) for y in (together, np.asarray(jax.jit(truncate_by_search)(*given))))
    assert np.abs(kept - by_xla).max() <= 1, "exponentials of the kernel and of XLA may round otherwise"
    for row in range(rows):
        alone = settings(top_k[row : row + 1], top_p[row : row + 1], [0])
        one = np.asarray(run(jnp.asarray(x[row : row + 1, :1]), alone))[0, 0]
        np.testing.assert_array_equal(one.view(np.uint32), together[row, 0].view(np.uint32))
