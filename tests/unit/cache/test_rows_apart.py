"""Rows that may lie on several devices are written and read as rows of one device are."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import StreamSpec, read, write
from jaxspec.cache.tree_reads import compact, read_block
from jaxspec.cache.window import Window

pytestmark = pytest.mark.served

ROWS, COUNT, HEADS, WIDTH, ROOM, BLOCK = 4, 3, 2, 4, 32, 8


def everything(window: Window, spec: StreamSpec, pages: jax.Array, new: jax.Array, path: jax.Array) -> tuple:
    pages = write(pages, spec, window, new)
    entry_BT = window.start_B[:, None] + jnp.arange(COUNT, dtype=jnp.int32)
    found = read(pages, spec, window, entry_BT), read_block(pages, spec, window, jnp.int32(1), new.shape[0])
    return compact({"k": pages}, {"k": spec}, window, path)["k"], *found


@pytest.mark.parametrize("row", [None, 2], ids=["all rows", "one row"])
@pytest.mark.parametrize("reach", [None, 12], ids=["pages", "rings"])
def test_apart_is_as_together(reach: int | None, row: int | None):
    rng, rows = np.random.default_rng(0), ROWS if row is None else 1
    spec = StreamSpec(HEADS, WIDTH, reach)
    pages = jnp.asarray(rng.random((ROWS, HEADS, 16 if reach else ROOM, WIDTH)), jnp.float32)
    new = jnp.asarray(rng.random((rows, COUNT, HEADS, WIDTH)), jnp.float32)
    path = jnp.asarray([[0, 2, 0]] * rows, jnp.int32)
    start = jnp.asarray([9, 15, 0, 12][:rows], jnp.int32)
    window = Window(start, row_B=None if row is None else jnp.asarray([row], jnp.int32), block=BLOCK)
    run = jax.jit(everything, static_argnums=1)
    together, apart = (run(replace(window, rows_sharded=apart), spec, pages, new, path) for apart in (False, True))
    for a, b in zip(together, apart, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(np.asarray(together[0]), np.asarray(pages))
