"""A row whose state was lost, and which was admitted again with its text so far, as if nothing had happened."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.decode.state import DecodeState
from jaxspec.pytree import replace
from jaxspec.shapes import Array


def recount(state: DecodeState, row: int, prompt: Sequence[int], generated: Sequence[int]) -> DecodeState:
    """Tells prompt and text apart, as penalties do.

    Args:
      state: whose row holds both as its prompt.
      row: of the sample.
      prompt: ids of its prompt.
      generated: ids of its text so far.
    """
    vocab = state.count_BV.shape[1]
    count_V = np.bincount(generated, minlength=vocab).astype(np.int32)
    prompt_V = np.isin(np.arange(vocab), prompt)
    return replace(state, count_BV=_put(state.count_BV, row, count_V), prompt_BV=_put(state.prompt_BV, row, prompt_V))


def _put(x_BV: Array, row: int, x_V: np.ndarray) -> Array:
    """The array with another row, where it lay: programs that were compiled before take it nowhere else."""
    new_BV = x_BV.at[row].set(x_V)
    return new_BV if new_BV.sharding == x_BV.sharding else jax.device_put(new_BV, x_BV.sharding)
