"""Recurrences in chunks: what steps give, up to rounding, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.recurrent_chunks import POSITIONS, run_chunks
from jaxspec.nn.recurrent_steps import Steps, scan

ROWS, HEADS, KEYS, VALUES = 2, 4, 6, 5
ZERO = jnp.zeros((ROWS, 1, 1, 1), jnp.int32)
KINDS = ["delta", "plain", "delta by channel", "plain by channel", "skip"]


def steps_of(kind: str, count: int, seed: int = 0, *, groups: int = 2) -> Steps:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(ROWS, count, *shape)).astype(np.float32)

    q, k = normal(groups, KEYS), normal(groups, KEYS)
    decay = np.exp(-np.exp(3 * normal(HEADS, KEYS if "channel" in kind else 1)))  # from 1 down to 0
    decay[:, [count // 3, count - 1]] = 0  # texts begin there
    return Steps(
        q, k / np.linalg.norm(k, axis=-1, keepdims=True), normal(HEADS, VALUES), decay,
        1 / (1 + np.exp(-normal(HEADS, 1))) if "delta" in kind else None,
        normal(HEADS, VALUES) if kind == "skip" else None,
    )  # fmt: skip


def state_of(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, HEADS, KEYS, VALUES)).astype(np.float32)


def both(kind: str, count: int, **shape: int):
    steps, state = steps_of(kind, count, **shape), state_of()
    return jax.jit(run_chunks)(state, steps), jax.jit(scan)(state, steps, ZERO)


def assert_close(got, wanted) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=4e-6 * max(np.abs(other).max(), 1))


@pytest.mark.parametrize("count", [1, 2, 37, POSITIONS, 2 * POSITIONS + 19])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_give_what_steps_give(kind: str, count: int):
    assert_close(*both(kind, count))


@pytest.mark.parametrize("groups", [1, HEADS])
@pytest.mark.parametrize("kind", KINDS[::2])
def test_heads_that_share_keys(kind: str, groups: int):
    assert_close(*both(kind, 40, groups=groups))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_steps(kind: str):
    steps, state = steps_of(kind, POSITIONS + 9), state_of()

    def slope(run, *args):
        def value(state, steps):
            out = run(state, steps, *args)
            return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)) for x in out)

        return jax.jit(jax.grad(value, argnums=(0, 1)))(state, steps)

    assert_close(slope(run_chunks), slope(scan, ZERO))


@pytest.mark.parametrize("kind", KINDS)
def test_cut_at_whole_chunks_the_bits_are_the_same(kind: str):
    steps, cut = steps_of(kind, 2 * POSITIONS), POSITIONS
    first, second = (jax.tree.map(lambda x, part=part: x[:, part], steps) for part in (slice(cut), slice(cut, None)))
    run = jax.jit(run_chunks)
    state, out = run(state_of(), first)
    state, rest = run(state, second)
    for one, other in zip((state, jnp.concatenate([out, rest], 1)), run(state_of(), steps), strict=True):
        np.testing.assert_array_equal(one, other)
