"""Widening is exact: number times scale in float32, rounded once."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.nn.dense import dense
from pallas_kernels.quantized import Format, Quantized, abstract_quantized, widen

FP4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FINITE = np.asarray([b for b in range(256) if b & 127 != 127], np.uint8)
widened = jax.jit(widen, static_argnums=1)


def spread(scale: np.ndarray, blocks: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The scale of every number, entry by entry."""
    out = np.empty(shape, scale.dtype)
    for index in np.ndindex(shape):
        out[index] = scale[tuple(i // b for i, b in zip(index, blocks, strict=True))]
    return out


def same(got: jax.Array, wanted: np.ndarray) -> None:
    """Equal to the last bit, the sign of zero included."""
    assert got.dtype == wanted.dtype
    assert np.asarray(got).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_e4m3_number(dtype: str):
    numbers = jnp.asarray(FINITE[None].view(ml_dtypes.float8_e4m3fn))
    weight = Quantized(numbers, jnp.ones((1, 2)), Format("fp8", (128, 128)))
    same(widened(weight, dtype), FINITE[None].view(ml_dtypes.float8_e4m3fn).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(192, 192), (576, 512), (136, 192), (1, 300)], ids=str)
def test_ragged_blocks(shape: tuple[int, int], dtype: str):
    rng = np.random.default_rng(0)
    numbers = rng.choice(FINITE, shape).view(ml_dtypes.float8_e4m3fn)
    form = Format("fp8", (128, 128))
    scale = rng.lognormal(size=form.scale_shape(shape)).astype(np.float32)
    weight = Quantized(jnp.asarray(numbers), jnp.asarray(scale), form)
    same(widened(weight, dtype), (numbers.astype(np.float32) * spread(scale, (128, 128), shape)).astype(dtype))


@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_fp4_halves_are_neighbours(axis: int):
    rng = np.random.default_rng(0)
    shape = (6, 8, 10)
    nibbles = rng.integers(0, 16, shape, dtype=np.uint8)
    low, high = (nibbles.take(np.arange(first, shape[axis], 2), axis) for first in (0, 1))
    exponents = rng.integers(100, 150, (6, 8, 10), dtype=np.uint8)
    form = Format("fp4", (1, 1, 1), exponent_scales=True, packed_axis=axis)
    weight = Quantized(jnp.asarray(low | high << 4), jnp.asarray(exponents), form)
    assert weight.shape == shape
    wanted = FP4[nibbles] * np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    same(widened(weight, "float32"), wanted.astype(np.float32))
    same(widened(weight, "bfloat16"), wanted.astype(ml_dtypes.bfloat16))


def test_exponents_from_the_least_to_the_greatest():
    """2 ** -127 is subnormal, which XLA:CPU takes for 0; what that loses is bounded here."""
    exponents = np.arange(255, dtype=np.uint8)[:, None]
    weight = Quantized(jnp.ones((255, 1), jnp.float8_e4m3fn), jnp.asarray(exponents), Format("fp8", (1, 1), True))
    wanted = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    got = np.asarray(widened(weight, "float32"))
    same(got[1:], wanted[1:].astype(np.float32))
    assert abs(got[0, 0] - wanted[0, 0]) * 448 < 3e-36


def test_int8_with_a_scale_per_output():
    rng = np.random.default_rng(0)
    numbers, scale = rng.integers(-127, 128, (40, 2, 24), dtype=np.int8), rng.random((1, 2, 24), np.float32)
    weight = Quantized(jnp.asarray(numbers), jnp.asarray(scale), Format("int8", (40, 1, 1)))
    same(widened(weight, "float32"), numbers.astype(np.float32) * scale)


def test_a_slice_of_a_stack_is_a_weight():
    rng = np.random.default_rng(0)
    numbers = rng.choice(FINITE, (3, 4, 130, 20)).view(ml_dtypes.float8_e4m3fn)
    form = Format("fp8", (128, 128))
    scale = rng.random(form.scale_shape(numbers.shape), np.float32)
    assert scale.shape == (3, 4, 2, 1)
    stack = Quantized(jnp.asarray(numbers), jnp.asarray(scale), form)
    one = jax.tree.map(lambda leaf: leaf[1, 2], stack)
    same(widened(one, "bfloat16"), np.asarray(widened(stack, "bfloat16"))[1, 2])


def test_products_widen_what_they_read():
    rng = np.random.default_rng(0)
    numbers = rng.choice(FINITE, (192, 3, 40)).view(ml_dtypes.float8_e4m3fn)
    form = Format("fp8", (128, 1, 8))
    weight = Quantized(jnp.asarray(numbers), jnp.asarray(rng.random((2, 3, 5), np.float32) / 448), form)
    x = jnp.asarray(rng.normal(size=(5, 192)), jnp.float32)
    plain = widen(weight, jnp.float32)
    np.testing.assert_array_equal(dense(x, weight, dtype=jnp.dtype("float32")), dense(x, plain))
    np.testing.assert_allclose(
        dense(x, weight, dtype=jnp.dtype("float32")), np.einsum("md,dgc->mgc", x, plain), rtol=1e-5, atol=1e-5
    )


def test_abstract_weights_have_the_shapes_of_real_ones():
    form = Format("fp4", (32, 1, 1), exponent_scales=True, packed_axis=-3)
    weight = abstract_quantized((4, 64, 2, 24), form)
    assert weight.shape == (4, 64, 2, 24)
    assert (weight.data.shape, weight.data.dtype) == ((4, 32, 2, 24), jnp.uint8)
    assert (weight.scale.shape, weight.scale.dtype) == ((4, 2, 2, 24), jnp.uint8)
