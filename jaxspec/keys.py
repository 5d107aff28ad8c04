"""Randomness keyed by request seed, position and purpose, never by step, batch slot or speculation length."""

from enum import IntEnum

import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


class Purpose(IntEnum):
    """Purpose of a random draw; draws for distinct purposes at one position are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def words_of(key_BX: Array, position_BT: Array, purpose: Purpose) -> tuple[Array, Array]:
    """Returns both words of ``jax.random.fold_in`` of position and purpose, uint32 [B, T] each."""
    first_BT = _threefry(key_BX[:, :1], key_BX[:, 1:], position_BT.astype(jnp.uint32))
    return _threefry(*first_BT, jnp.full(position_BT.shape, int(purpose), jnp.uint32))


def _threefry(first: Array, second: Array, number: Array) -> tuple[Array, Array]:
    """Encrypts numbers below 2^32 by keys of two words: Threefry-2x32 with 20 rounds (Salmon 2011), uint32.

    The bits are JAX's. On a CPU its rounds are a loop that copies all numbers; written out they are one kernel
    (docs/kernels.md has times).
    """
    keys = first, second, first ^ second ^ jnp.uint32(0x1BD11BDA)
    y = number + second
    x = jnp.broadcast_to(first, y.shape)
    for turn in range(5):
        for by in ROTATIONS[turn % 2]:
            x = x + y
            y = x ^ ((y << by) | (y >> (32 - by)))
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x, y


def _below_1(x: Array, y: Array) -> Array:
    """Returns uniform numbers in [0, 1) of random bits, as JAX makes them."""
    from_1_to_2 = lax.bitcast_convert_type(((x ^ y) >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    return from_1_to_2 - 1


def within_step(anchor_B: Array, rank_BT: Array) -> Array:
    """Returns positions that key draws by step: from the anchor's position and a rank (node or depth) in it, [B, T].

    Rejection rules need it: block verification looks beyond the last draft that it accepts, so drafts and coins that
    it saw there must not come back when the next step drafts for the same positions.
    """
    # Ranks are keyed far above any context length, where they never meet another position's key.
    return anchor_B[:, None] + rank_BT * (1 << 24)


def gumbel(key_BX: Array, position_BT: Array, purpose: Purpose, tokens: int | Array) -> Array:
    """Draws standard Gumbel noise of tokens for each position, float32 [B, T, V].

    The argmax of log-probabilities plus this noise is a sample of them (Gumbel-max); the same position gets the
    same noise in drafting and in verification, which makes a good draft agree with the target even when sampling.
    A token's number does not depend on which others get one: that of token v is the v-th of ``jax.random.gumbel``.

    Args:
      key_BX: both words of each row's key.
      position_BT: of the token that is drawn.
      purpose: of the draw.
      tokens: ids of the tokens, [V] or [B, T, V]; a number stands for all below it.
    """
    first_BT, second_BT = words_of(key_BX, position_BT, purpose)
    number = jnp.arange(tokens) if isinstance(tokens, int) else tokens
    tiny = jnp.finfo(jnp.float32).tiny
    below_1 = _below_1(*_threefry(first_BT[..., None], second_BT[..., None], number.astype(jnp.uint32)))
    return -jnp.log(-jnp.log(jnp.maximum(below_1 + tiny, tiny)))


def uniform(key_BX: Array, position_BT: Array, purpose: Purpose) -> Array:
    """Draws uniform numbers in [0, 1), float32 [B, T]."""
    first_BT, second_BT = words_of(key_BX, position_BT, purpose)
    return _below_1(*_threefry(first_BT, second_BT, jnp.zeros_like(first_BT)))
