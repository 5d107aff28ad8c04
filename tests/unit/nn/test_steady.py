"""The first maximum of a row, found in blocks, is the one that is found number by number; functions near numpy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.steady import row_argmax, row_top_k, tanh
from pallas_kernels import steady


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_the_first_maximum(count: int):
    rng = np.random.default_rng(count)
    x = rng.integers(-3, 3, (4, 5, count)).astype(np.float32)  # ties happen
    x[0, 0], x[0, 1] = -np.inf, np.where(np.arange(count) % 2, -np.inf, -1e30)
    found = jax.jit(row_argmax)(x)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, x.argmax(-1))


def test_what_is_no_number_wins_as_in_argmax():
    x = np.zeros((2, 200), np.float32)
    x[0, 130] = x[0, 199] = np.nan
    np.testing.assert_array_equal(jax.jit(row_argmax)(x), np.asarray(jnp.argmax(x, axis=-1)))


@pytest.mark.served
def test_parts_of_the_best_are_found_without_a_sort():
    x = np.random.default_rng(0).integers(-9, 9, (2, 3, 500)).astype(np.float32)  # ties happen
    program = jax.jit(lambda x: [part[:, 1] for part in row_top_k(x, 4)]).lower(x).compile()
    for one, other in zip(program(x), jax.lax.top_k(x, 4), strict=True):
        np.testing.assert_array_equal(one, other[:, 1])
    assert " sort(" not in program.as_text()


def test_tanh_is_that_of_numpy():
    x = np.concatenate([np.linspace(-20, 20, 4001), [-1e4, -1e-8, 0, 1e-8, 1e4]]).astype(np.float32)
    np.testing.assert_allclose(jax.jit(tanh)(x), np.tanh(x.astype(np.float64)), atol=1e-7)


@pytest.mark.parametrize("fuses_some", [False, True])
def test_exponentials_are_good_to_float32_in_both_forms(fuses_some: bool, monkeypatch: pytest.MonkeyPatch):
    """The form for jax 0.12, whose products are rounded, runs here whatever jax is installed."""
    monkeypatch.setattr(steady, "FUSES_SOME", fuses_some)
    x = np.linspace(-86, 88, 100_001, dtype=np.float32)
    program = jax.jit(lambda x: steady.polynomial_exp.__wrapped__(x)).lower(x)
    assert ("xor" in program.as_text()) == fuses_some
    np.testing.assert_allclose(program.compile()(x), np.exp(x.astype(np.float64)), rtol=1.2e-7)
