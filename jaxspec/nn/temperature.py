"""Queries that grow with their position, so that long texts do not flatten attention."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxspec.shapes import Array


@dataclass(frozen=True)
class Temperature:
    """The factor ``1 + scale ln(1 + floor((position + first) / step))`` (Nakanishi 2025, arXiv 2501.19399; Llama 4).

    Attributes:
      scale: how much it grows.
      step: positions with the same factor.
      longest: of a text in positions; later ones have the last factor.
      first: number of the first position, 1 for Llama 4 and 0 for Mistral 4.
    """

    scale: float
    step: int
    longest: int
    first: int = 1

    def at(self, position_BT: Array) -> Array:
        """Returns the factors of int32 positions, float32; from a table, so that they are the same in every program."""
        steps = np.arange(self.longest // self.step + 1)
        factor_N = jnp.asarray(1 + self.scale * np.log1p(steps), jnp.float32)
        return jnp.take(factor_N, (position_BT + self.first) // self.step, mode="clip")
