"""The kernel that adds and normalizes: a row's numbers are its own, and norms by it are those by XLA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.fused_norm import PartialSum, add_and_normalize
from jaxspec.nn.matrix import Matrix
from jaxspec.nn.norm import rms_norm
from pallas_kernels.add_norm.api import MOST_ROWS, Norm, Parts, add_norm, obstacles
from pallas_kernels.select import UnsupportedKernel

RNG = np.random.default_rng(0)
NORM = Norm(1e-6, 0.0, "bfloat16", 2)
SCALE = jnp.asarray(RNG.normal(size=(2, 24)), jnp.bfloat16)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


@pytest.mark.served
def test_a_row_does_not_see_its_neighbors():
    x, parts = normal(7, 24), normal(3, 7, 24)
    run = jax.jit(lambda x, p: add_norm(x, SCALE[0], NORM, Parts(p), implementation="interpret"))
    together, alone = run(x, parts), run(x[4:5], parts[:, 4:5])
    rows = (slice(4, 5), slice(4, 5), (slice(None), slice(4, 5)))
    for one, every, row in zip(alone, together, rows, strict=True):
        assert one is not None
        assert every is not None
        assert np.asarray(one).tobytes() == np.asarray(every)[row].tobytes()


def test_norms_of_a_stack_by_kernel_and_by_xla():
    x, added = normal(2, 3, 24), normal(2, 6, 24)
    layer, out_bias = jnp.int32(1), normal(2, 24)
    found = {}
    for how in ("interpret", "xla"):
        scale, bias = (Matrix(w, layer, how) for w in (SCALE, out_bias))
        found[how] = add_and_normalize(x, scale, Norm(1e-6, 0.0), PartialSum(added, bias))
    for one, other in zip(found["interpret"][:2], found["xla"][:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(found["xla"][0].reshape(6, 24), x.reshape(6, 24) + added.sum(0) + out_bias[1], atol=1e-6)


def test_many_rows_are_xlas_without_a_warning():
    x, scale = normal(MOST_ROWS + 1, 24), Matrix(SCALE[0], None, "interpret")
    total, normed, copy = add_and_normalize(x, scale, NORM)
    assert (copy, total is x) == (None, True)
    np.testing.assert_array_equal(normed, rms_norm(x, SCALE[0], 1e-6))


def test_what_does_not_fit_is_refused():
    call: Any = partial(add_norm, normal(2, 24), implementation="interpret")
    with pytest.raises(UnsupportedKernel, match="a scale of each column"):
        call(SCALE, NORM)
    with pytest.raises(UnsupportedKernel, match=r"parts of \(2, 24\) needed"):
        call(SCALE[0], NORM, Parts(normal(1, 3, 24)))
    assert "more than 16384" in obstacles(jnp.zeros((1, 20000)))[0]
