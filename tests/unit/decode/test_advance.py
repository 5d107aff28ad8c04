"""What a step leaves in the state of each row, and what is left of a row that is retired."""

import jax.numpy as jnp
import numpy as np

from jaxspec.decode.prefill import retire
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import advance
from jaxspec.protocol import NoDrafts, Verdict
from jaxspec.pytree import replace
from jaxspec.verify.walk import Ends
from tests.unit.decode.test_live import ROWS, UNSURE, MarkovNet

LENGTH = [4, 2, 5, 0]


def state_of():
    target = Target(UNSURE, MarkovNet(3), block=16)
    state = init_state(target, NoDrafts(), ROWS, 12, slack=8, stop_ids=1)
    history_BS = np.full(state.history_BS.shape, 7, np.int32)
    return replace(
        state,
        history_BS=jnp.asarray(history_BS),
        length_B=jnp.asarray(LENGTH, jnp.int32),
        active_B=jnp.ones(ROWS, bool),
    )


def test_committed_tokens_follow_the_anchor():
    token_BT = jnp.asarray([[0, 1, 2], [1, 1, 1], [2, 0, 0], [0, 0, 0]], jnp.int32)
    count_B = jnp.asarray([3, 1, 2, 0], jnp.int32)
    path_BT = jnp.zeros((ROWS, 3), jnp.int32) + jnp.arange(3, dtype=jnp.int32)
    none_B = jnp.zeros(ROWS, bool)
    ends = Ends(none_B, jnp.asarray([False, True, False, False]), none_B)
    state = advance(state_of(), Verdict(path_BT, token_BT, count_B), ends, apart=False)
    assert state.length_B.tolist() == [7, 3, 7, 0]
    assert state.anchor_B.tolist() == [2, 1, 0, 0]
    assert state.active_B.tolist() == [True, False, True, True]
    history_BS = np.asarray(state.history_BS)
    for row, (length, count) in enumerate(zip(LENGTH, count_B.tolist(), strict=True)):
        assert history_BS[row, : length + 1].tolist() == [7] * (length + 1)
        assert history_BS[row, length + 1 : length + 1 + count].tolist() == token_BT[row, :count].tolist()


def test_a_retired_row_is_idle():
    state = retire(state_of(), jnp.int32(2))
    assert state.active_B.tolist() == [True, True, False, True]
    assert state.length_B.tolist() == [4, 2, 0, 0]
