"""Attention of a head that is trained on its own output, against its definition in double precision."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn import unrolled
from jaxspec.nn.unrolled import Unrolled, attend_unrolled

attend = partial(attend_unrolled, scale=0.3)
B, T, H, G, C, ROUNDS = 2, 40, 4, 2, 8, 3


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, T, H, C)).astype(np.float32)
    kv = rng.normal(size=(ROUNDS, 2, B, T, G, C)).astype(np.float32)
    return q, kv, np.sort(rng.integers(1, 4, (B, T)), axis=1).astype(np.int32)


def memory_of(kv, segment_BT, slot_BX=None, dtype=jnp.float32):
    memory = Unrolled(jnp.asarray(segment_BT)).append(*kv[0], dtype)
    if slot_BX is not None:
        memory = memory.keep(slot_BX, slot_BX)
    for k, v in kv[1:]:
        memory = memory.append(*((k, v) if slot_BX is None else (taken(k, slot_BX), taken(v, slot_BX))), dtype)
    return memory


def taken(x, slot_BX):
    return jnp.take_along_axis(x, slot_BX[:, :, None, None], axis=1)


def defined(q, kv, segment_BT, span, sinks_H):
    """Each slot sees the real ones of its text up to itself, then what it drafted; the sinks have no value."""
    out = np.zeros((B, T, H, C))
    for b, x, h in np.ndindex(B, T, H):
        g = h // (H // G)
        first = 0 if span is None else max(0, x - span + len(kv))
        real = [s for s in range(first, x + 1) if segment_BT[b, s] == segment_BT[b, x]]
        keys = np.concatenate([kv[0, 0, b, real, g], kv[1:, 0, b, x, g]]).astype(np.float64)
        values = np.concatenate([kv[0, 1, b, real, g], kv[1:, 1, b, x, g]])
        weight = np.exp(keys @ q[b, x, h] * 0.3)
        sink = 0 if sinks_H is None else np.exp(sinks_H[h])
        out[b, x, h] = weight @ values / (weight.sum() + sink)
    return out


@pytest.mark.parametrize(("span", "sinks"), [(None, False), (9, False), (None, True)])
def test_chunks_give_what_is_defined(drawn, span, sinks, monkeypatch: pytest.MonkeyPatch):
    q, kv, segment_BT = drawn
    sinks_H = np.linspace(-1, 1, H).astype(np.float32) if sinks else None
    monkeypatch.setattr(unrolled, "CHUNK", 16)
    out = attend(q, memory_of(jnp.asarray(kv), segment_BT), span=span, sinks_H=sinks_H)
    np.testing.assert_allclose(out, defined(q, kv, segment_BT, span, sinks_H), atol=2e-6)


def test_factors_of_its_products_may_be_bfloat16(drawn):
    q, kv, segment_BT = drawn
    out = attend(q, memory_of(jnp.asarray(kv), segment_BT, dtype=jnp.bfloat16))
    missed = np.abs(out - defined(q, kv, segment_BT, None, None))
    assert 1e-4 < missed.max() < 0.05


def test_some_slots_give_what_they_give_among_all(drawn, monkeypatch: pytest.MonkeyPatch):
    q, kv, segment_BT = drawn
    monkeypatch.setattr(unrolled, "CHUNK", 16)
    slot_BX = jnp.asarray([[0, 3, 17, 39], [1, 2, 20, 30]], jnp.int32)
    every = attend(q, memory_of(jnp.asarray(kv), segment_BT))
    some = attend(taken(q, slot_BX), memory_of(jnp.asarray(kv), segment_BT, slot_BX))
    np.testing.assert_allclose(some, taken(every, slot_BX), atol=2e-6)


def test_gradients_do_not_depend_on_chunks(drawn, monkeypatch: pytest.MonkeyPatch):
    q, kv, segment_BT = drawn
    wanted = np.random.default_rng(1).normal(size=q.shape)

    def loss(q, kv):
        return jnp.sum(attend(q, memory_of(kv, segment_BT)) * wanted)

    whole = jax.grad(loss, argnums=(0, 1))(jnp.asarray(q), jnp.asarray(kv))
    monkeypatch.setattr(unrolled, "CHUNK", 16)
    chunked = jax.grad(loss, argnums=(0, 1))(jnp.asarray(q), jnp.asarray(kv))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, chunked)
