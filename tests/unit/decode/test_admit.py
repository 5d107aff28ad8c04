"""A row starts with its prompt, or goes on with its text after a failure: penalties tell the two apart."""

import jax.numpy as jnp
import numpy as np

from jaxspec.decode.prefill import admit
from jaxspec.decode.state import Target, init_sampling, init_state
from jaxspec.protocol import NoDrafts
from jaxspec.pytree import replace
from tests.unit.verify.test_rules_texts import MarkovNet


def test_what_was_generated_is_counted_and_the_prompt_is_not():
    target = Target(jnp.zeros((5, 5)), MarkovNet(5), block=16)
    state = init_state(target, NoDrafts(), 2, 12, slack=4, stop_ids=1)
    text_S = np.zeros(state.history_BS.shape[1], np.int32)
    text_S[:6] = [1, 2, 1, 3, 3, 2]
    for known, counts in ((3, [0, 0, 1, 2, 0]), (np.iinfo(np.int32).max, [0] * 5)):
        sampling = replace(init_sampling(1, 1), prompt_length_B=np.full(1, known, np.int32))
        row = admit(state, jnp.int32(1), text_S, jnp.int32(6), sampling, None)
        assert row.count_BV.tolist() == [[0] * 5, counts]
        assert row.prompt_BV[1].tolist() == [False, True, True, known > 3, False]
        assert (int(row.length_B[1]), int(row.anchor_B[1])) == (5, 2)
