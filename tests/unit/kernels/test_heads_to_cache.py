"""The kernel from product to cache: a row's numbers are its own, and nothing is written where there is no place."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.temperature import Temperature
from pallas_kernels.heads_to_cache.api import Heads, heads_to_cache, obstacles
from pallas_kernels.select import UnsupportedKernel

G, R, C, Z = 2, 3, 16, 8
HEADS = Heads(G, R, C, turned=C, eps=1e-6)
RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.normal(size=C), jnp.bfloat16) for name in ("q_norm", "k_norm")}


@jax.jit
def run(part_SMN: jax.Array, pages: Any, where: Any):
    call = partial(heads_to_cache, params=PARAMS, where=where, implementation="interpret")
    return call(part_SMN, (pages, pages), HEADS)


def inputs(rows: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    angle = jnp.asarray(RNG.normal(size=(rows, C // 2)), jnp.float32)
    part = jnp.asarray(RNG.normal(size=(2, rows, G * (R + 2) * C)), jnp.float32)
    return part, {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}


@pytest.mark.served
def test_a_row_does_not_see_its_neighbors():
    part, turn = inputs(5)
    pages, first = jnp.zeros((5, G, Z, C), jnp.float32), jnp.asarray([3, 0, 7, 2, 5], jnp.int32)
    q, k, v = run(part, pages, {"first": first, **turn})
    alone = run(part[:, 2:3], pages[:1], {"first": first[2:3], **{name: x[2:3] for name, x in turn.items()}})
    for one, all_rows in zip(alone, (q, k, v), strict=True):
        assert np.ptp(one) > 0
        assert np.asarray(one).tobytes() == np.asarray(all_rows)[2:3].tobytes()


def test_an_entry_without_a_place_is_left_out():
    """After a page's end, before its beginning, and on a page that there is not; the last row has a place."""
    part, turn = inputs(4)
    old = jnp.asarray(RNG.normal(size=(4, G, Z, C)), jnp.float32)
    where = {"first": jnp.asarray([Z, -1, 0, 2], jnp.int32), "row": jnp.asarray([0, 1, 4, 3], jnp.int32), **turn}
    q, *new = run(part, old, where)
    assert np.isfinite(q).all()
    for pages in new:
        changed = np.argwhere((np.asarray(pages) != np.asarray(old)).any(axis=(1, 3)))
        np.testing.assert_array_equal(changed, [[3, 2]])


def test_what_does_not_fit_is_refused():
    part, turn = inputs(2)
    pages, where = jnp.zeros((2, G, Z, C)), {"first": jnp.zeros(2, jnp.int32), **turn}
    with pytest.raises(UnsupportedKernel, match="first, cos and sin are needed"):
        heads_to_cache(part, (pages, pages), HEADS, params={}, where={"first": where["first"]})
    with pytest.raises(UnsupportedKernel, match=r"parts \[S, M, 160\]"):
        heads_to_cache(part[..., 1:], (pages, pages), HEADS, params={}, where=where)
    assert "a cache of int8 is not written" in obstacles(HEADS, pages.astype(jnp.int8))[0]
    assert "more than 32768 numbers" in obstacles(Heads(1, 126, 512), pages)[0]


@pytest.mark.parametrize("more", [
    {"gated": True}, {"norm_turned": True}, {"qk_norm": "full"}, {"qk_norm": "bare"}, {"value_dim": 8},
    {"value_scale": 0.5}, {"value_norm": True}, {"shared_values": True}, {"temperature": Temperature(0.1, 8, 64)},
])  # fmt: skip
def test_other_mechanisms_are_xlas(more: dict[str, Any]):
    assert AttentionSpec(4, G, C, qk_norm="head", qkv_bias=True, window=8, chunked=True, sinks=True).plain
    assert not AttentionSpec(4, G, C, **more).plain
