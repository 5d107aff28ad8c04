"""Texts to look drafts up in, indexed so that the longest match of a suffix takes one binary search."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.errors import ConfigError
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

MOST_TOKENS = 1 << 26  # two arrays of int32: half a gibibyte


@pytree
class LookupCorpus:
    """Tokens, and their places ordered by the text before them, read backwards (a suffix array of the reversed text).

    Attributes:
      token_L: tokens of all texts, -1 between two.
      order_L: places in ``token_L``.
    """

    token_L: Array
    order_L: Array

    @classmethod
    def of(cls, texts: Sequence[Sequence[int] | np.ndarray], longest: int) -> "LookupCorpus":
        """Indexes texts by up to ``longest`` tokens before each place; takes about a second per million tokens.

        Raises:
          ConfigError: there are no tokens, or too many.
        """
        parts = [part for text in texts if len(text) for part in (np.asarray(text, np.int32), np.array([-1], np.int32))]
        size = sum(len(part) for part in parts)
        if not parts or size > MOST_TOKENS:
            raise ConfigError(
                f"prompt_lookup_corpus: from 1 to {MOST_TOKENS} tokens can be looked up, got {size}; "
                "leave the key out, or name fewer files"
            )
        token_L = np.concatenate(parts)
        columns = [np.concatenate([np.full(back, -1, np.int32), token_L])[:size] for back in range(longest)]
        return cls(jnp.asarray(token_L), jnp.asarray(np.lexsort(columns[::-1]).astype(np.int32)))

    def continuation(self, suffix_BJ: Array, step_N: Array) -> tuple[Array, Array]:
        """Returns the length of the longest match of each suffix, the last token first, and what followed it.

        Args:
          suffix_BJ: int32, -1 before the text.
          step_N: [1, N], distances after the match.

        Returns:
          Matched tokens [B]; tokens [B, N], -1 where the text ends.
        """
        size, back_J = self.token_L.shape[0], jnp.arange(suffix_BJ.shape[1], dtype=jnp.int32)[None]

        def before(rank_B: Array) -> Array:
            place_BJ = self.order_L[jnp.clip(rank_B, 0, size - 1)][:, None] - back_J
            return jnp.where(place_BJ >= 0, self.token_L[jnp.maximum(place_BJ, 0)], -1)

        def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low_B, high_B = ends
            middle_B = (low_B + high_B) // 2
            text_BJ = before(middle_B)
            differs_BJ = text_BJ != suffix_BJ
            first_B = jnp.argmax(differs_BJ, axis=1)[:, None]
            less_B = (jnp.take_along_axis(text_BJ, first_B, 1) < jnp.take_along_axis(suffix_BJ, first_B, 1))[:, 0]
            searching_B = low_B < high_B
            return (
                jnp.where(searching_B & less_B, middle_B + 1, low_B),
                jnp.where(searching_B & ~less_B, middle_B, high_B),
            )

        low_B = jnp.zeros(suffix_BJ.shape[0], jnp.int32)
        rank_B, _ = lax.fori_loop(0, size.bit_length(), halve, (low_B, low_B + size))

        def matched(rank_B: Array) -> Array:
            same_BJ = (before(rank_B) == suffix_BJ) & (suffix_BJ >= 0)
            return jnp.sum(jnp.cumprod(same_BJ, axis=1, dtype=jnp.int32), axis=1)

        # The longest match is a neighbor of where the suffix would stand.
        here_B, left_B = matched(rank_B), jnp.where(rank_B > 0, matched(rank_B - 1), 0)
        best_B = jnp.where(here_B >= left_B, rank_B, rank_B - 1)
        place_BN = self.order_L[jnp.clip(best_B, 0, size - 1)][:, None] + step_N
        token_BN = jnp.where(place_BN < size, self.token_L[jnp.minimum(place_BN, size - 1)], -1)
        return jnp.maximum(here_B, left_B), token_BN
