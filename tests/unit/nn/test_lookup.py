"""Rows of tables: their values, their gradient, and that no loop widens a whole table for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspec.nn.dense import lookup


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_and_their_gradient(dtype):
    table_VD = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), dtype)
    place_BT = jnp.array([[5, 0], [0, 3]], jnp.int32)
    found, back = jax.vjp(lambda table_VD: lookup(table_VD, place_BT), table_VD)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.asarray(table_VD, np.float32)[np.asarray(place_BT)])
    (gradient_VD,) = back(jnp.ones_like(found))
    assert gradient_VD.dtype == dtype
    np.testing.assert_array_equal(np.asarray(gradient_VD, np.float32)[:, 0], [2, 0, 0, 1, 0, 1])


@pytest.mark.served
def test_a_loop_holds_no_other_copy_of_the_table():
    def walk(table_VD, first):
        """Ten rows, each named by the one before."""
        return lax.fori_loop(0, 10, lambda _, at: jnp.int32(lookup(table_VD, at).sum()) % 4096, first)

    table_VD = jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16)
    memory = jax.jit(walk).lower(table_VD, jax.ShapeDtypeStruct((), jnp.int32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4096 * 64
