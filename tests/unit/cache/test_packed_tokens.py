"""Packed positions: live ones come first, and go back to where they were."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.packed_tokens import pack_live
from jaxspec.cache.window import Segments, Window, pack, unpack

LIVE_BT = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1]], bool)


@pytest.mark.parametrize("places", [6, 9, 12])
def test_live_positions_come_first_and_go_back(places: int):
    packing = pack_live(jnp.asarray(LIVE_BT), places)
    assert packing.live_M.tolist() == [True] * 6 + [False] * (places - 6)
    x_BTC = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    packed = packing.pack(jnp.asarray(x_BTC))
    assert packed.shape == (1, places, 2)
    np.testing.assert_array_equal(packed[0, :6], x_BTC[LIVE_BT])
    back = packing.unpack(packed)
    assert back.shape == x_BTC.shape
    np.testing.assert_array_equal(np.asarray(back)[LIVE_BT], x_BTC[LIVE_BT])


def test_without_packing_all_stays_in_rows():
    x_BT = jnp.ones((4, 3))
    for window in (None, Segments(jnp.ones((4, 3), jnp.int32)), Window(jnp.zeros(4, jnp.int32))):
        assert pack(x_BT, window) is x_BT
        assert unpack(x_BT, window) is x_BT
    window = Window(jnp.zeros(4, jnp.int32), live_BT=x_BT > 0)
    assert window.valid is window.live_BT
