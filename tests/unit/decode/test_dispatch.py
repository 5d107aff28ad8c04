"""A report says on the host what the steps did on the device; a runner cuts prompts into chunks."""

import jax.numpy as jnp
import numpy as np

from jaxspec.decode.dispatch import Report
from jaxspec.decode.runner import chunks
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


def test_chunks_cover_a_prompt_but_for_its_last_token():
    prompt = np.arange(1, 12, dtype=np.int32)
    cut = [(size, c.start, c.count, c.token_X.tolist()) for size, c in chunks(prompt, (2, 4), 0)]
    assert cut == [
        (4, 0, 4, [1, 2, 3, 4, 5]), (4, 4, 4, [5, 6, 7, 8, 9]), (2, 8, 2, [9, 10, 11]),
    ]  # fmt: skip
    assert list(chunks(prompt[:1], (2, 4), 0)) == [], "the last token is the first anchor"
