"""Hyper-connections give what the published equations say, and the same bits for any number of rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.dense import dense
from jaxspec.nn.hyper import HyperConnection, HyperHead, HyperSpec, merge
from jaxspec.nn.policy import make_policy
from jaxspec.nn.steady import added_products, row_dot, softplus

DIM, EPS, NORM_EPS = 24, 1e-6, 1e-5
FLOAT, HALF = jnp.dtype("float32"), jnp.dtype("bfloat16")


def connection_params(rng: np.random.Generator, streams: int = 4, dim: int = DIM) -> dict[str, np.ndarray]:
    size = streams * (2 + streams)
    fn = rng.standard_normal((size, streams * dim)) * (streams * dim) ** -0.5
    values = {"mix_fn_XS": fn, "mix_base_X": rng.standard_normal(size), "mix_scale_X": 1 + rng.random(3)}
    return {name: value.astype(np.float32) for name, value in values.items()}


@partial(jax.jit, static_argnums=0)
def applied(module: Any, params: Any, x_BTND: Any) -> Any:
    return module.apply({"params": params}, x_BTND)


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def published(params: dict[str, np.ndarray], x_ND: np.ndarray, rounds: int):
    """One token's read vector, writing weights and mixing matrix in double precision, loop by loop."""
    n = len(x_ND)
    flat = x_ND.reshape(-1).astype(np.float64)
    m = params["mix_fn_XS"].astype(np.float64) @ (flat / np.sqrt(np.mean(flat**2) + NORM_EPS))
    scale, base = params["mix_scale_X"].astype(np.float64), params["mix_base_X"].astype(np.float64)
    pre = logistic(m[:n] * scale[0] + base[:n]) + EPS
    post = 2 * logistic(m[n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
    comb = np.exp(comb) / np.exp(comb).sum(axis=1, keepdims=True) + EPS
    comb /= comb.sum(axis=0, keepdims=True) + EPS
    for _ in range(rounds - 1):
        comb /= comb.sum(axis=1, keepdims=True) + EPS
        comb /= comb.sum(axis=0, keepdims=True) + EPS
    return sum(pre[i] * x_ND[i] for i in range(n)), post, comb


@pytest.mark.parametrize(("streams", "rounds"), [(4, 20), (3, 1), (2, 5)])
def test_connection_is_the_published_one(streams: int, rounds: int):
    rng = np.random.default_rng(0)
    params = connection_params(rng, streams)
    x_BTND = rng.standard_normal((2, 3, streams, DIM)).astype(np.float32)
    out_BTD = rng.standard_normal((2, 3, DIM)).astype(np.float32)
    module = HyperConnection(HyperSpec(streams, rounds, EPS), DIM, NORM_EPS, make_policy(FLOAT))
    read, write, comb = applied(module, params, x_BTND)
    after = jax.jit(merge)(x_BTND, out_BTD, write, comb)
    read, write, comb, after = jax.device_get((read, write, comb, after))
    for place in np.ndindex(2, 3):
        wanted = published(params, x_BTND[place], rounds)
        for found, value in zip((read, write, comb), wanted, strict=True):
            np.testing.assert_allclose(found[place], value, rtol=0, atol=5e-6)
        _, post, mix = wanted
        for j in range(streams):
            stream = post[j] * out_BTD[place] + sum(mix[i, j] * x_BTND[place][i] for i in range(streams))
            np.testing.assert_allclose(after[place][j], stream, rtol=0, atol=1e-5)


def test_mixing_neither_grows_nor_shrinks_the_sum_of_the_streams():
    rng = np.random.default_rng(1)
    x_BTND = jnp.asarray(rng.standard_normal((1, 4, 4, DIM)), jnp.float32)
    module = HyperConnection(HyperSpec(), DIM, NORM_EPS, make_policy(FLOAT))
    _, write, comb = applied(module, connection_params(rng), x_BTND)
    after = jax.jit(merge)(x_BTND, jnp.zeros((1, 4, DIM)), write, comb)
    np.testing.assert_allclose(after.sum(axis=2), x_BTND.sum(axis=2), rtol=0, atol=1e-3)


def test_head_is_the_published_one():
    rng = np.random.default_rng(2)
    fn = (rng.standard_normal((4, 4 * DIM)) * 0.1).astype(np.float32)
    base, scale = rng.standard_normal(4).astype(np.float32), np.array([1.5], np.float32)
    x_ND = rng.standard_normal((4, DIM)).astype(np.float32)
    params = {"head_fn_NS": fn, "head_base_N": base, "head_scale_X": scale}
    found = applied(HyperHead(HyperSpec(), DIM, NORM_EPS, make_policy(FLOAT)), params, x_ND[None, None])
    flat = x_ND.reshape(-1) / np.sqrt(np.mean(x_ND**2) + NORM_EPS)
    wanted = (logistic(fn @ flat * scale + base) + EPS) @ x_ND
    np.testing.assert_allclose(np.asarray(found)[0, 0], wanted, rtol=0, atol=5e-6)


@pytest.mark.served
@pytest.mark.parametrize("dim", [64, 200])
def test_bits_do_not_depend_on_the_rows_beside_them(dim: int):
    rng = np.random.default_rng(3)
    params = jax.tree.map(jnp.asarray, connection_params(rng, dim=dim))
    w_DX = jnp.asarray(rng.standard_normal((dim, dim)) * dim**-0.5, HALF)
    module = HyperConnection(HyperSpec(), dim, NORM_EPS, make_policy(HALF))

    @jax.jit
    def twice(x_BTND):
        for _ in range(2):
            read, write, comb = applied(module, params, x_BTND)
            x_BTND = merge(x_BTND, dense(read, w_DX, dtype=HALF), write, comb)
        return x_BTND

    x_BTND = rng.standard_normal((3, 5, 4, dim)).astype(np.float32)
    many = np.asarray(twice(x_BTND)).view(np.uint32)
    one = np.stack([np.asarray(twice(x_BTND[:1, t : t + 1]))[0, 0] for t in range(5)]).view(np.uint32)
    np.testing.assert_array_equal(many[0], one)


def test_sums_of_products_keep_float32():
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((2, 6, 50)).astype(np.float32)
    wanted = (a.astype(np.float64) * b).sum(axis=1, keepdims=True)
    found = added_products((jnp.asarray(a[:, i]), jnp.asarray(b[:, i])) for i in range(50))
    np.testing.assert_allclose(found, wanted[:, 0], rtol=0, atol=5e-6)
    np.testing.assert_allclose(row_dot(jnp.asarray(a), jnp.asarray(b)), wanted, rtol=0, atol=5e-6)
    slope = jax.grad(lambda a: row_dot(a, jnp.asarray(b)).sum())(jnp.asarray(a))
    np.testing.assert_allclose(slope, b, rtol=1e-3, atol=1e-6)
    slope_a, slope_b = jax.grad(lambda *pair: added_products([pair]).sum(), (0, 1))(
        jnp.asarray(a), jnp.asarray(b[:, :1])
    )
    np.testing.assert_allclose(slope_a, np.broadcast_to(b[:, :1], a.shape), rtol=1e-6, atol=0)
    np.testing.assert_allclose(slope_b, a.sum(axis=1, keepdims=True), rtol=0, atol=1e-5)


def test_softplus_keeps_float32_at_both_ends():
    x = np.concatenate([np.linspace(-80, 80, 4001), np.linspace(-1, 1, 1001), [0.0]]).astype(np.float32)
    wanted = np.logaddexp(x.astype(np.float64), 0)
    np.testing.assert_allclose(softplus(jnp.asarray(x)), wanted, rtol=1e-6, atol=0)
    slope = jax.vmap(jax.grad(softplus))(jnp.asarray(x))
    np.testing.assert_allclose(slope, logistic(x.astype(np.float64)), rtol=0, atol=1e-6)
