"""Products round a row alike however many rows there are: what losslessness in bfloat16 rests on."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn import dense as room
from jaxspec.nn.dense import batched_dense, dense, einsum, exact_dense

BFLOAT16 = jnp.dtype("bfloat16")
COUNTS = (1, 2, 3, 4, 5, 8, 17, 18, 19, 34, 40)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), BFLOAT16)


def product(x_MD: jax.Array, depth: int, columns: int) -> jax.Array:
    return dense(x_MD, drawn(depth, columns))


def per_group(x_MD: jax.Array, depth: int, columns: int) -> jax.Array:
    return batched_dense(x_MD[None], drawn(1, depth, columns), contract=1, dtype=BFLOAT16)[0]


@pytest.mark.parametrize("columns", [5, 16, 256])
@pytest.mark.parametrize("depth", [64, 256, 7, 16, 33, 48, 80, 100])
@pytest.mark.parametrize("compute", [product, per_group])
def test_rows_are_rounded_alike_however_many_there_are(compute: Callable[..., jax.Array], depth: int, columns: int):
    x_MD = drawn(max(COUNTS), depth)
    found = {
        count: np.asarray(jax.jit(compute, static_argnums=(1, 2))(x_MD[:count], depth, columns)) for count in COUNTS
    }
    for count, rows in found.items():
        np.testing.assert_array_equal(rows, found[max(COUNTS)][:count], err_msg=f"{count} rows")
    exact = np.asarray(x_MD, np.float64) @ np.asarray(drawn(depth, columns), np.float64)
    np.testing.assert_allclose(found[max(COUNTS)], exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("tiles", "depth"), [(True, 64), (False, 48)])
def test_a_machine_with_tiles_pads_rows_and_whole_tiles(tiles: bool, depth: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "has_tiles", lambda: tiles)
    few = 2
    if tiles:
        few = 3 if jax.__version_info__ < (0, 12) else 5
    for count, padded in ((1, few), (16, 16), (17, 16 + few if tiles else 17), (40, 40)):
        text = jax.jit(lambda x, w: dense(x, w)).lower(drawn(count, 48), drawn(48, 8)).as_text()
        assert f"(tensor<{padded}x{depth}xbf16>, tensor<{depth}x8xbf16>)" in text
    assert room.padded_rows(0) == 0
    assert room.whole_tiles(jnp.zeros((2, 48)), 1, jnp.dtype("float32")).shape == (2, 48)


def test_the_gradient_of_a_weight_that_was_transposed():
    x_MD, w_XD = drawn(160, 128), drawn(1024, 128).astype(jnp.float32)

    @jax.jit
    def updated(w_XD: jax.Array) -> jax.Array:
        return w_XD - jax.grad(lambda w_XD: jnp.sum(dense(x_MD, w_XD.T, dtype=BFLOAT16) ** 2))(w_XD)

    x, w = np.asarray(x_MD, np.float64), np.asarray(w_XD, np.float64)
    np.testing.assert_allclose(updated(w_XD), w - 2 * (x @ w.T).T @ x, rtol=0.02, atol=20)


@pytest.mark.served
def test_an_exact_product_by_constants_stays_one():
    """XLA would make three of it, one for each part of x, and their sums round unlike those of a single row."""
    w_DX = drawn(32, 4)
    program = jax.jit(lambda x_MD: exact_dense(x_MD, w_DX, dtype=BFLOAT16)).lower(jnp.zeros((5, 32))).compile()
    assert str(program.as_text()).count(" dot(") == 1


@pytest.mark.parametrize("rule", ["zqc,ztc->zqt", "zqt,ztc->zqc", "bnsgrc,btgc->bgrnst", "bgrnst,btgc->bnsgrc"])
def test_gradients_of_an_einsum_are_those_of_its_definition(rule: str):
    first, second, out = rule.replace("->", ",").split(",")
    sizes = dict(zip("zqctbnsgr", range(2, 11), strict=True))
    rng = np.random.default_rng(0)
    a, b, wanted = (rng.normal(size=[sizes[i] for i in term]).astype(np.float32) for term in (first, second, out))
    found = jax.grad(lambda a, b: jnp.sum(einsum(rule, a, b, jnp.float32) * wanted), argnums=(0, 1))(a, b)
    exact = np.einsum(f"{out},{second}->{first}", wanted, b), np.einsum(f"{first},{out}->{second}", a, wanted)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_an_einsum_multiplies_in_its_dtype_forward_and_back():
    a, b = jnp.ones((2, 5, 3)), jnp.ones((2, 4, 3))
    loss = jax.grad(lambda a, b: jnp.sum(einsum("zqc,ztc->zqt", a, b, BFLOAT16) ** 2), argnums=(0, 1))
    products = [line for line in jax.jit(loss).lower(a, b).as_text().splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 3
    assert all(line.count("xbf16>") == 2 for line in products)
    np.testing.assert_array_equal(einsum("zqc,ztc->zqt", a + 1e-3, b, BFLOAT16), jnp.full((2, 5, 4), 3.0))
