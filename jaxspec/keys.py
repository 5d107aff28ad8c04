"""Randomness keyed by request seed, position and purpose, never by step, batch slot or speculation length."""

from enum import IntEnum

import jax
import jax.numpy as jnp

from jaxspec.shapes import Array


class Purpose(IntEnum):
    """Purpose of a random draw; draws for distinct purposes at one position are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def _keys(key_BX: Array, position_BT: Array, purpose: Purpose) -> Array:
    def one(words: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, position), int(purpose)))

    return jax.vmap(lambda words, row: jax.vmap(lambda position: one(words, position))(row))(key_BX, position_BT)


def within_step(anchor_B: Array, rank_BT: Array) -> Array:
    """Returns positions that key draws by step: from the anchor's position and a rank (node or depth) in it, [B, T].

    Rejection rules need it: block verification looks beyond the last draft that it accepts, so drafts and coins that
    it saw there must not come back when the next step drafts for the same positions.
    """
    # Ranks are keyed far above any context length, where they never meet another position's key.
    return anchor_B[:, None] + rank_BT * (1 << 24)


def gumbel(key_BX: Array, position_BT: Array, purpose: Purpose, width: int) -> Array:
    """Draws standard Gumbel noise for the token at each position, float32 [B, T, width].

    The argmax of log-probabilities plus this noise is a sample of them (Gumbel-max); the same position gets the
    same noise in drafting and in verification, which makes a good draft agree with the target even when sampling.
    """
    words = _keys(key_BX, position_BT, purpose)

    def draw(word: Array) -> Array:
        return jax.random.gumbel(jax.random.wrap_key_data(word, impl="threefry2x32"), (width,), jnp.float32)

    return jax.vmap(jax.vmap(draw))(words)


def uniform(key_BX: Array, position_BT: Array, purpose: Purpose) -> Array:
    """Draws uniform numbers in [0, 1), float32 [B, T]."""
    words = _keys(key_BX, position_BT, purpose)

    def draw(word: Array) -> Array:
        return jax.random.uniform(jax.random.wrap_key_data(word, impl="threefry2x32"), (), jnp.float32)

    return jax.vmap(jax.vmap(draw))(words)
