"""Positions in a line: where each lies, and that what counts comes back to its place."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.kv import Packed, Window, in_line, in_rows
from jaxspec.cache.ragged import ragged_of

LIVE_BT = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]], bool)


@pytest.mark.parametrize("places", [6, 9, 12])
def test_what_counts_comes_first_and_back_to_its_place(places: int):
    ragged = ragged_of(jnp.asarray(LIVE_BT), places)
    assert ragged.live_M.tolist() == [True] * 6 + [False] * (places - 6)
    x_BTC = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    line = ragged.line(jnp.asarray(x_BTC))
    assert line.shape == (1, places, 2)
    np.testing.assert_array_equal(line[0, :6], x_BTC[LIVE_BT])
    back = ragged.rows(line)
    assert back.shape == x_BTC.shape
    np.testing.assert_array_equal(np.asarray(back)[LIVE_BT], x_BTC[LIVE_BT])


def test_without_a_line_all_stays_in_rows():
    x_BT = jnp.ones((4, 3))
    for window in (None, Packed(jnp.ones((4, 3), jnp.int32)), Window(jnp.zeros(4, jnp.int32))):
        assert in_line(x_BT, window) is x_BT
        assert in_rows(x_BT, window) is x_BT
    window = Window(jnp.zeros(4, jnp.int32), live_BT=x_BT > 0)
    assert window.counting is window.live_BT
