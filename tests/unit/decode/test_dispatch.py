"""A report says on the host what the steps did on the device."""

import jax.numpy as jnp

from jaxspec.decode.dispatch import Report
from jaxspec.decode.telemetry import Counts


def test_a_report_is_read_as_it_was_packed():
    # Two tokens per step at most; then how many count, usable drafts, whether they were verified.
    first = [[5, 6, 2, 1, 1], [7, 0, 1, 0, 0], [0] * 5, [0, 1, 0, 2, 0]]
    second = [[8, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0] * 5, [1, 0, 0, 2, 0]]
    nothing = jnp.zeros((2, 0, 2, 1))
    result = Report(jnp.asarray([first, second]), nothing, nothing, Counts(None, None), sparse=True).unpack()
    assert (result.steps, result.length) == (2, 1)
    assert result.token_BXT.tolist() == [[[5, 6], [7, 0]], [[8, 0], [0, 0]]]
    assert result.count_BX.tolist() == [[2, 1], [1, 0]]
    assert result.drafts_BX.tolist() == [[1, 0], [1, 0]]
    assert result.verified_X.tolist() == [True, False]
    assert result.verified_BX.tolist() == [[1, 0], [1, 0]]
    assert (result.broken_B.tolist(), result.stopped_B.tolist()) == ([False, True], [True, False])
    assert result.ended_B.tolist() == [True, True]
    assert not result.full_B.any()
