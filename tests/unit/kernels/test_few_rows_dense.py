"""Few-row products: rows do not see each other, weights flatten without moving, what is not possible is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.dense import dense, exact_dense
from jaxspec.nn.matrix import Matrix
from pallas_kernels.few_rows_dense.api import OP, few_rows_dense, flat, obstacles, products_of_rows
from pallas_kernels.quantized import Format, Quantized, abstract_quantized
from pallas_kernels.select import Choice, SlowKernelWarning, UnsupportedKernel
from pallas_kernels.weight_cases import abstract_weight, random_weight

BFLOAT16 = jnp.dtype(jnp.bfloat16)


def product(x_MD: jax.Array, w, **settings) -> np.ndarray:
    return np.asarray(few_rows_dense(x_MD, w, dtype=BFLOAT16, implementation="interpret", **settings))


@pytest.mark.served
@pytest.mark.parametrize(("form", "block"), [("bfloat16", 0), ("fp8", 16), ("fp8", 128), ("int8", 0)])
def test_a_row_is_the_same_among_any_others(form: str, block: int):
    x = jax.random.normal(jax.random.key(0), (40, 544), jnp.float32)
    w = random_weight(jax.random.key(1), abstract_weight(form, (), (544, 24), block))
    whole = product(x[::-1], w)[::-1]
    for rows in (1, 17):
        assert np.array_equal(product(x[:rows], w), whole[:rows]), rows


@pytest.mark.served
def test_weights_together_give_the_bits_of_each_alone():
    x, sizes = jax.random.normal(jax.random.key(0), (19, 1056), jnp.float32), {"fp8": 40, "int8": 8, "bfloat16": 150}
    weights = [random_weight(jax.random.key(n), abstract_weight(f, (), (1056, n), 32)) for f, n in sizes.items()]
    choice = Choice(OP, "", "interpret", "asked for")
    together = products_of_rows(x, weights, dtype=BFLOAT16, layer=None, implementation=choice)
    for w, part_SMN in zip(weights, together, strict=True):
        assert len(part_SMN) > 1
        assert np.array_equal(part_SMN, product(x, w, summed=False))


def test_the_stack_is_read_at_its_layer():
    x, stack = (
        jax.random.normal(jax.random.key(0), (3, 64), jnp.float32),
        jax.random.normal(jax.random.key(1), (4, 64, 32)),
    )
    for layer in (0, 3):
        found = product(x, stack.astype(BFLOAT16), layer=jnp.int32(layer))
        assert np.array_equal(found, product(x, stack[layer].astype(BFLOAT16)))


def test_wrong_shapes_are_refused():
    x, w = jnp.zeros((2, 64)), jnp.zeros((64, 32), BFLOAT16)
    with pytest.raises(UnsupportedKernel, match=r"\(2, 64\) and \(32, 64\)"):
        product(x, w.T)
    with pytest.raises(UnsupportedKernel, match=r"bias of \(32,\) needed, got \(3,\)"):
        product(x, w, bias_N=jnp.zeros(3))


def test_what_the_kernel_cannot_do_is_said():
    wide = abstract_weight("bfloat16", (), (64, 32))
    assert obstacles(wide, 512, stacked=False) == []
    assert "513 rows" in obstacles(wide, 513, stacked=False)[0]
    assert "two numbers per byte" in obstacles(abstract_weight("mxfp4", (), (64, 32)), 4, stacked=False)[0]


# Axes of a weight, how many are contracted, numbers per scale, and those once axes are one.
LAYOUTS = [
    ((256, 4, 6, 128), 1, (128, 1, 1, 128), (128, 128)),
    ((256, 4, 6, 64), 1, (128, 1, 2, 64), (128, 128)),
    ((16, 128, 256), 2, (1, 128, 128), (128, 128)),
    ((256, 2, 384), 1, (256, 1, 1), (256, 1)),
    ((256, 4, 192), 1, (128, 1, 128), None),
    ((256, 4, 64), 1, (128, 2, 32), None),
]


@pytest.mark.parametrize(("shape", "axes", "blocks", "flat_blocks"), LAYOUTS)
def test_flat_weights_keep_their_numbers(shape, axes, blocks, flat_blocks):
    form = Format("fp8", blocks)
    data = jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(form.dtype)
    scale = jax.random.uniform(jax.random.key(1), form.scale_shape(shape), jnp.float32, 0.5, 2.0)
    weight = Quantized(data, scale, form)
    found = flat(weight, 0, axes)
    if flat_blocks is None:
        assert found is None
        return
    assert isinstance(found, Quantized)
    assert found.format.blocks == flat_blocks
    again = Quantized(found.data, found.scale, Format("fp8", found.format.blocks)).widen(jnp.float32)
    assert np.array_equal(again, weight.widen(jnp.float32).reshape(again.shape))


@pytest.mark.parametrize("product_of", [dense, exact_dense])
def test_a_matrix_multiplies_like_its_weight(product_of):
    x = jax.random.normal(jax.random.key(0), (2, 3, 96), jnp.float32)
    stack = (jax.random.normal(jax.random.key(1), (3, 96, 2, 24), jnp.float32) / 10).astype(BFLOAT16)
    bias = jnp.ones((2, 24), BFLOAT16)
    found = product_of(x, Matrix(stack, jnp.int32(2), "interpret"), bias, dtype=BFLOAT16)
    wanted = product_of(x, stack[2], bias, dtype=BFLOAT16)
    assert found.shape == (2, 3, 2, 24)
    assert np.abs(found - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_scales_that_are_no_neighbors_are_widened_with_a_warning():
    form = Format("fp8", (128, 1, 128))
    like = abstract_quantized((2, 128, 2, 192), form)
    stack = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), like)
    with pytest.warns(SlowKernelWarning, match="no neighbors"):
        found = dense(jnp.ones((1, 128)), Matrix(stack, jnp.int32(1), "triton"), dtype=BFLOAT16)
    assert np.array_equal(found, np.full((1, 2, 192), 128.0))
