"""Products per head: rows do not see each other, scales round as widened weights do, what is not possible is said."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.heads_dense.api import Cut, heads_dense, obstacles
from pallas_kernels.quantized import Format, Quantized, abstract_quantized
from pallas_kernels.select import UnsupportedKernel

H, X, R = 3, 40, 48
QUERIES, VALUES = Cut(0, 24, further=8), Cut(24, 16, from_rank=True)
BFLOAT16 = jnp.dtype(jnp.bfloat16)
FORMS = {"fp8": (1, 8, 16), "int8": (1, 1, R)}


def product(x_SMN: jax.Array, w: Any, cut: Cut, **settings: Any) -> np.ndarray:
    return np.asarray(heads_dense(x_SMN, w, cut, dtype=BFLOAT16, implementation="interpret", **settings))


def weight(kind: str) -> Any:
    plain = jax.random.normal(jax.random.key(1), (H, X, R), jnp.float32)
    if kind not in FORMS:
        return plain.astype(BFLOAT16)
    form = Format("fp8" if kind == "fp8" else "int8", FORMS[kind])
    scale = jax.random.uniform(jax.random.key(2), form.scale_shape((H, X, R)), jnp.float32, 0.1, 2.0)
    return Quantized((plain * (30 if kind == "int8" else 1)).astype(form.dtype), scale, form)


def rows_of(cut: Cut, count: int, parts: int = 1) -> jax.Array:
    width = R if cut.from_rank else cut.count + cut.further
    return jax.random.normal(jax.random.key(0), (parts, count, H * width), jnp.float32)


@pytest.mark.served
@pytest.mark.parametrize("cut", [QUERIES, VALUES], ids=["queries", "values"])
@pytest.mark.parametrize("kind", ["bfloat16", *FORMS])
def test_a_row_is_the_same_among_any_others(kind: str, cut: Cut):
    x, w = rows_of(cut, 70, parts=2), weight(kind)
    whole = product(x[:, ::-1], w, cut)[::-1]
    for rows in (1, 17, 40):
        assert np.array_equal(product(x[:, :rows], w, cut), whole[:rows]), rows


@pytest.mark.served
@pytest.mark.parametrize("cut", [QUERIES, VALUES], ids=["queries", "values"])
@pytest.mark.parametrize("kind", FORMS)
def test_quantized_weights_give_the_bits_of_widened_ones(kind: str, cut: Cut):
    x, w = rows_of(cut, 5), weight(kind)
    assert np.array_equal(product(x, w, cut), product(x, w.widen(BFLOAT16), cut))


def test_the_stack_is_read_at_its_layer():
    stack = jnp.stack([weight("bfloat16"), weight("bfloat16")[::-1]])
    for layer in range(2):
        in_stack = product(rows_of(VALUES, 3), stack, VALUES, layer=jnp.int32(layer))
        assert np.array_equal(in_stack, product(rows_of(VALUES, 3), stack[layer], VALUES))


def test_wrong_shapes_are_refused():
    w = weight("bfloat16")
    with pytest.raises(UnsupportedKernel, match=r"parts \[S, M, 96\] are needed, got \(1, 2, 144\)"):
        product(rows_of(VALUES, 2), w, QUERIES)
    with pytest.raises(UnsupportedKernel, match=r"a weight of 4 axes needed, got \(3, 40, 48\)"):
        product(rows_of(QUERIES, 2), w, QUERIES, layer=jnp.int32(0))
    with pytest.raises(UnsupportedKernel, match="40 channels per head do not hold"):
        product(rows_of(VALUES, 2), w, Cut(32, 16, from_rank=True))
    with pytest.raises(UnsupportedKernel, match="cos with sin, got cos"):
        product(rows_of(QUERIES, 2), w, QUERIES, where={"cos": jnp.zeros((2, 4))})


def test_what_the_kernel_cannot_do_is_said():
    plain = jax.ShapeDtypeStruct((2, H, X, R), jnp.bfloat16)
    assert obstacles(plain, 512) == []
    assert "513 rows" in obstacles(plain, 513)[0]
    packed = abstract_quantized((H, X, 64), Format("fp4", (1, 1, 32), packed_axis=-1))
    assert "two numbers per byte" in obstacles(packed, 4)[0]
