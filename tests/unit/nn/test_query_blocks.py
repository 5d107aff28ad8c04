"""Attention of long texts by blocks of queries: the same numbers and gradients, in memory linear in the length."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn import attend, query_blocks
from jaxspec.nn.attend import attend_self
from jaxspec.nn.unrolled import Unrolled, attend_unrolled

ROWS, COUNT, HEADS, KV, WIDTH = 2, 22, 4, 2, 8
SEGMENTS = jnp.asarray([[1] * 9 + [2] * 11 + [0] * 2, [1] * 22], jnp.int32)


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def texts(count: int = COUNT, seed: int = 0) -> tuple[jax.Array, ...]:
    return tuple(drawn(seed + n, ROWS, count, heads, WIDTH) for n, heads in enumerate((HEADS, KV, KV)))


def chosen(count: int) -> jax.Array:
    """What each query sees of the text, itself among it."""
    some = np.random.default_rng(9).random((1, count, count)) < 0.5
    return jnp.asarray(some | np.eye(count, dtype=bool))


CASES: dict[str, dict[str, Any]] = {
    "texts": {"segment_BT": SEGMENTS, "span": 6},
    "sinks": {"sinks_H": drawn(7, HEADS)},
    "selection": {"seen_BTS": chosen(COUNT)},
}


def of_itself(case: dict[str, Any], arrays: tuple[jax.Array, ...]) -> Any:
    def loss(arrays: Any) -> jax.Array:
        return jnp.sum(jnp.sin(attend_self(*arrays, scale=0.3, **case)))

    return jax.jit(jax.value_and_grad(loss))(arrays)


@pytest.mark.parametrize("name", CASES)
def test_a_long_text_attends_as_a_short_one(name: str, monkeypatch: pytest.MonkeyPatch):
    whole, of_whole = of_itself(CASES[name], texts())
    for module in (attend, query_blocks):  # four parts, the last of five queries in blocks of two
        monkeypatch.setattr(module, "BLOCK", 2)
    some, of_some = of_itself(CASES[name], texts())
    np.testing.assert_allclose(some, whole, rtol=1e-5)
    for one, other in zip(of_some, of_whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [("float32", 1e-5, 1e-6), ("bfloat16", 2e-2, 2e-2)])
def test_rounds_attend_by_blocks_as_at_once(dtype: str, rtol: float, atol: float, monkeypatch: pytest.MonkeyPatch):
    def loss(rounds: Any) -> jax.Array:
        memory, total = Unrolled(SEGMENTS), jnp.float32(0)
        for q, k, v in rounds:
            memory = memory.append(k, v, jnp.dtype(dtype))
            total += jnp.sum(jnp.sin(attend_unrolled(q, memory, scale=0.3, span=9)))
        return total

    rounds = [texts(seed=10 * j) for j in range(3)]
    whole, of_whole = jax.jit(jax.value_and_grad(loss))(rounds)
    monkeypatch.setattr(query_blocks, "BLOCK", 5)
    some, of_some = jax.jit(lambda r: jax.value_and_grad(loss)(r))(rounds)
    np.testing.assert_allclose(some, whole, rtol=rtol)
    for one, other in zip(jax.tree.leaves(of_some), jax.tree.leaves(of_whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


@pytest.mark.served
def test_memory_grows_with_the_length_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(query_blocks, "SCORE_BYTES", 1 << 20)

    def allotted(count: int) -> int:
        arrays = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in texts(count))
        compiled = jax.jit(jax.grad(lambda a: jnp.sum(attend_self(*a, scale=0.3)))).lower(arrays).compile()
        sizes: Any = compiled.memory_analysis()
        return sizes.temp_size_in_bytes

    assert allotted(4096) < min(2.5 * allotted(2048), 4 * ROWS * HEADS * 4096 * 4096 / 8)
