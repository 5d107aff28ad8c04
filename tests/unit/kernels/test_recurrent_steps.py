"""Steps of recurrences: the same bits however positions are cut into calls, and whatever runs beside them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_steps.api import Counts, Positions, recurrent_steps
from pallas_kernels.select import UnsupportedKernel

ROWS, COUNT, HEADS, GROUPS, KEYS, VALUES = 3, 6, 4, 2, 6, 10
RNG = np.random.default_rng(0)
STATE = jnp.asarray(RNG.normal(size=(ROWS, HEADS, KEYS, VALUES)), jnp.float32)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=(ROWS, COUNT, *shape)), jnp.float32)


KINDS = {
    "delta": Positions(
        drawn(GROUPS, KEYS), drawn(GROUPS, KEYS) / 3, drawn(HEADS, VALUES), jax.nn.sigmoid(drawn(HEADS, 1)),
        jax.nn.sigmoid(drawn(HEADS, 1)),
    ),
    "channels": Positions(
        drawn(GROUPS, KEYS), drawn(GROUPS, KEYS) / 3, drawn(HEADS, VALUES), jax.nn.sigmoid(drawn(HEADS, KEYS)),
        skip_BXHC=drawn(HEADS, VALUES),
    ),
}  # fmt: skip


@partial(jax.jit, static_argnames="last")
def run(state, arrays, replay_B, kept_B, last):
    return recurrent_steps(state, Positions(*arrays), Counts(replay_B, kept_B, last), implementation="interpret")


def part(positions: Positions, *numbers: int | slice) -> list:
    rows, cut = (slice(None), *numbers) if len(numbers) == 1 else numbers
    return [None if x is None else x[rows, cut] for x in vars(positions).values()]


def every(count: int, rows: int = ROWS) -> jax.Array:
    return jnp.full(rows, count, jnp.int32)


@pytest.mark.served
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_cuts_replays_or_neighbors(kind: str):
    positions = KINDS[kind]
    state, one_by_one, states = STATE, [], [STATE]
    for t in range(COUNT):
        state, out = run(state, part(positions, slice(t, t + 1)), every(0), every(1), 1)
        one_by_one.append(np.asarray(out))
        states.append(state)
    wanted = np.concatenate(one_by_one, axis=1)
    kept = np.array([0, 3, COUNT])
    state, out = run(STATE, part(positions, slice(None)), every(0), jnp.asarray(kept, jnp.int32), COUNT)
    np.testing.assert_array_equal(out, wanted)
    for row, count in enumerate(kept):
        np.testing.assert_array_equal(state[row], states[count][row])
    # The first three run once more where they became text, others are rejected; the last three follow.
    replays = np.array([3, 3, 3])
    state, out = run(STATE, part(positions, slice(None)), jnp.asarray(replays, jnp.int32), every(1), 3)
    np.testing.assert_array_equal(out, wanted[:, 3:])
    np.testing.assert_array_equal(state, states[4])
    follow = [
        None if x is None else jnp.concatenate([x[:, :1], x[:, 3:4], x[:, 1:2]], 1)
        for x in part(positions, slice(None))
    ]
    state, out = run(STATE, follow, every(1), every(1), 1)
    np.testing.assert_array_equal(out, wanted[:, 1:2])
    np.testing.assert_array_equal(state, states[2])
    alone, out = run(STATE[1:2], part(positions, slice(1, 2), slice(None)), every(0, 1), every(COUNT, 1), COUNT)
    np.testing.assert_array_equal(out, wanted[1:2])
    np.testing.assert_array_equal(alone, states[COUNT][1:2])


@pytest.mark.parametrize(
    ("changes", "last", "said"),
    [
        ({"v_BXHC": KINDS["delta"].v_BXHC[:, :, :3]}, COUNT, "v of .* needed"),
        ({"decay_BXHN": drawn(HEADS, 2)}, COUNT, "decay of .* or .* needed"),
        ({}, COUNT + 1, "the last 7 of 6 positions"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changes: dict, last: int, said: str):
    positions = Positions(**{**vars(KINDS["delta"]), **changes})
    with pytest.raises(UnsupportedKernel, match=said):
        recurrent_steps(STATE, positions, Counts(every(0), every(0), last))
