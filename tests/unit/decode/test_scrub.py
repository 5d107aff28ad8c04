"""Nothing that is not finite stays in caches, whatever they are stored as; all else stays bit for bit."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode.scrub import scrub
from jaxspec.decode.state import DecodeState
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

VALUES = np.float32([0, -0.0, 1.5, -6e4, np.nan, -np.nan, np.inf, -np.inf, 1e-40])
CLEAN = np.where(np.isfinite(VALUES), VALUES, 0)


@pytree
class State:
    layers: tuple[dict[str, Array], ...]
    draft: dict[str, Any]
    other: Array


def test_scrub():
    bits = jax.lax.bitcast_convert_type(jnp.asarray(VALUES, jnp.bfloat16), jnp.uint16)
    kept = {"k": jnp.asarray(VALUES), "v": bits}
    draft = {"h": jnp.asarray(VALUES, jnp.float16), "n": jnp.asarray([1, -2]), "set": jnp.asarray([True])}
    state = cast(DecodeState, State((kept,), draft, jnp.asarray(VALUES)))
    done = cast(State, jax.jit(scrub)(state))
    np.testing.assert_array_equal(np.asarray(done.layers[0]["k"]).view(np.uint32), CLEAN.view(np.uint32))
    clean = jax.lax.bitcast_convert_type(jnp.asarray(CLEAN, jnp.bfloat16), jnp.uint16)
    np.testing.assert_array_equal(done.layers[0]["v"], clean)
    np.testing.assert_array_equal(done.draft["h"], CLEAN.astype(np.float16))
    np.testing.assert_array_equal(done.draft["n"], [1, -2])
    np.testing.assert_array_equal(done.draft["set"], [True])
    assert np.isnan(np.asarray(done.other)).any(), "only caches are scrubbed"
