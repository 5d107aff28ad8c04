"""Verdicts are cut behind stop ids, at length limits and where no token could be sampled."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import init_sampling
from jaxspec.protocol import Verdict
from jaxspec.pytree import replace
from jaxspec.verify.walk import stop_at, unsound

STOP, OTHER_STOP = 7, 9


@dataclass(frozen=True)
class Row:
    """One row: accepted tokens, how many positions are left to it, which is unsound, and what must come out."""

    name: str
    tokens: tuple[int, ...]
    room: int
    count: int
    stopped: bool = False
    full: bool = False
    active: bool = True
    unsound: int = -1
    broken: bool = False


ROWS = (
    Row("nothing", (1, 2, 3, 4), 99, 4),
    Row("one token", (1,), 99, 1),
    Row("stop first", (STOP, 2, 3, 4), 99, 1, stopped=True),
    Row("stop in the middle", (1, 2, STOP, 4), 99, 3, stopped=True),
    Row("stop last", (1, 2, 3, STOP), 99, 4, stopped=True),
    Row("second stop id", (1, OTHER_STOP, 3), 99, 2, stopped=True),
    Row("two stops", (1, STOP, OTHER_STOP, 4), 99, 2, stopped=True),
    Row("stop behind the accepted tokens", (1, 2), 99, 2),
    Row("length", (1, 2, 3, 4), 2, 2, full=True),
    Row("length to the token", (1, 2, 3, 4), 4, 4, full=True),
    Row("one position left", (1, 2, 3, 4), 1, 1, full=True),
    Row("one position short of the limit", (1, 2, 3), 4, 3),
    Row("stop before the limit", (1, STOP, 3, 4), 3, 2, stopped=True),
    Row("stop at the limit", (1, 2, STOP, 4), 3, 3, stopped=True),
    Row("stop behind the limit", (1, 2, 3, STOP), 3, 3, full=True),
    Row("idle", (1, STOP, 3), 2, 0, active=False),
    Row("idle without room", (1, 2), -5, 0, active=False),
    Row("unused places of the stop ids", (-1, 2, 3), 99, 3),
    Row("unsound at once", (1, 2, 3), 99, 0, unsound=0, broken=True),
    Row("unsound after two tokens", (1, 2, 3), 99, 2, unsound=2, broken=True),
    Row("unsound where nothing was accepted", (1, 2), 99, 2, unsound=2),
    Row("unsound after a stop", (1, STOP, 3), 99, 2, unsound=2, stopped=True),
    Row("a stop that is unsound", (1, STOP, 3), 99, 1, unsound=1, broken=True),
    Row("unsound after the limit", (1, 2, 3), 2, 2, unsound=2, full=True),
    Row("unsound at the limit", (1, 2, 3), 2, 1, unsound=1, broken=True),
    Row("unsound and idle", (1, 2), 99, 0, unsound=0, active=False),
)


@pytest.fixture(scope="module")
def outcome():
    width, length = 4, 20
    tokens = np.full((len(ROWS), width), STOP, np.int32)  # what lies behind the accepted tokens must not count
    for place, row in enumerate(ROWS):
        tokens[place, : len(row.tokens)] = row.tokens
    stops = np.tile(np.array([STOP, -2, OTHER_STOP], np.int32), (len(ROWS), 1))
    sampling = replace(
        init_sampling(len(ROWS), 3),
        stop_BX=jnp.asarray(stops),
        max_length_B=jnp.asarray([length + 1 + row.room for row in ROWS], jnp.int32),
    )
    count_B = jnp.asarray([len(row.tokens) for row in ROWS], jnp.int32)
    verdict = Verdict(jnp.zeros_like(tokens), jnp.asarray(tokens), count_B)
    active_B = jnp.asarray([row.active for row in ROWS])
    unsound_BT = jnp.arange(width) == jnp.asarray([row.unsound for row in ROWS])[:, None]
    length_B = jnp.full(len(ROWS), length, jnp.int32)
    cut, ends = jax.jit(stop_at)(verdict, sampling, length_B, active_B, unsound_BT)
    np.testing.assert_array_equal(cut.token_BT, tokens)
    return tuple(map(np.asarray, (cut.count_B, ends.stopped_B, ends.full_B, ends.broken_B)))


@pytest.mark.parametrize("place", range(len(ROWS)), ids=lambda place: ROWS[place].name)
def test_stop_at(outcome, place: int):
    row = ROWS[place]
    assert tuple(int(values[place]) for values in outcome) == (row.count, row.stopped, row.full, row.broken)


@pytest.mark.parametrize("exact", [True, False])
def test_unsound_scores(exact: bool):
    """A NaN anywhere, infinity as the best, or nothing to choose from; -inf beside something finite is a ban."""
    nan, inf = np.nan, np.inf
    score = np.float32([[[0, 1, -inf], [0, nan, 2], [-inf, -inf, -inf], [nan, nan, nan], [0, inf, 1]]])
    path = jnp.arange(5, dtype=jnp.int32)[None]
    verdict = Verdict(path, jnp.argmax(jnp.asarray(score), axis=-1).astype(jnp.int32), jnp.full(1, 5, jnp.int32))
    unsound_BT = unsound(jnp.asarray(score), jnp.asarray(score), verdict, exact=exact)
    np.testing.assert_array_equal(unsound_BT, [[False, True, True, True, True]])


def test_a_score_that_a_penalty_made_infinite_is_sound():
    logits, score = jnp.asarray([[[1.0, 2.0]]]), jnp.asarray([[[1.0, jnp.inf]]])
    verdict = Verdict(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    assert not unsound(logits, score, verdict, exact=True).any()
