"""Rows of a table of weights by number."""

import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array


def lookup(table_VD: Array, place: Array) -> Array:
    """Rows of a table by number, float32 [..., D].

    XLA:CPU widens the table of a bfloat16 gather to float32. It must not do so in front of a loop that looks up, the
    whole table in every dispatch, but in the gather, a row at a time: so the table waits for the numbers, which
    change in every turn.

    Args:
      table_VD: weights, of any floating type.
      place: row numbers, int32 of any shape, below V.
    """
    table_VD, place = lax.optimization_barrier((table_VD, place))
    return table_VD[place].astype(jnp.float32)
