"""Ways to verify, narrow and wide, of which a step takes the one that its drafts need."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array

Way = Callable[[Any], tuple[Any, Any]]
WIDEST, NARROWER = "widest_way", "narrower_way"  # scopes of the only loops that turn once or never
STEP, GPU_STEP = 8, 128  # positions; with fewer a GPU reads weights longer than it computes (a roofline, not measured)


def line_lengths(rows: int, drafts: int, parts: int, on_gpu: bool = False) -> tuple[int, ...]:
    """Positions that are computed where not all are: the anchors with one part of the drafts, with two, and so on.

    In whole steps, and a step less than all at least: fewer are not worth a program.

    Args:
      rows: B.
      drafts: of a row.
      parts: of all drafts, equally large.
      on_gpu: whether steps are a GPU's.
    """
    step = GPU_STEP if on_gpu else STEP
    wanted = [rows + rows * drafts * part / parts for part in range(1, parts)]
    lengths = {math.ceil(want / step) * step for want in wanted}
    return tuple(sorted(length for length in lengths if length + step <= rows * (drafts + 1)))


def one_of(ways: Sequence[Way], which: Array, state: Any) -> tuple[Any, Any]:
    """Runs one way: as loops that turn once or never, for XLA copies every cache that goes through a conditional.

    Args:
      ways: take the state and return a new one with an outcome, all in the same shapes; the widest is the last.
      which: int32 scalar, place of the one to take.
      state: of all rows.
    """
    if len(ways) == 1:
        return ways[0](state)
    _, shapes = jax.eval_shape(ways[0], state)
    done = state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    for place, way in enumerate(ways):

        def turn(carry: tuple[Array, Any, Any], way: Way = way) -> tuple[Array, Any, Any]:
            return jnp.bool_(False), *way(carry[1])

        with jax.named_scope(WIDEST if way is ways[-1] else NARROWER):
            _, *done = lax.while_loop(lambda carry: carry[0], turn, (which == place, *done))
    state, out = done
    return state, out
