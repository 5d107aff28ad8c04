"""Recurrences some positions at a time: a few products of matrices in place of one step after another."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.nn.recurrent_steps import Steps
from jaxspec.pytree import pytree
from jaxspec.shapes import Array

POSITIONS = 64  # of a chunk


@pytree
class _Decay:
    """What is left over parts of a chunk, the parts as long as each other.

    Attributes:
      prefix: from the beginning of a position's part up to it, its own decay included, [..., L, X].
      suffix: from after a position to the end of its part, [..., L, X].
    """

    prefix: Array
    suffix: Array

    def merged(self, size: int) -> "_Decay":
        """Returns the same over two parts of ``size`` positions together."""
        (before, after), (left, right) = (halves(x, size) for x in (self.prefix, self.suffix))
        after, left = after * before[..., -1:, :], left * after[..., -1:, :]
        return _Decay(*(jnp.stack(x, axis=-3).reshape(self.prefix.shape) for x in ((before, after), (left, right))))


def run_chunks(state_BHNC: Array, steps: Steps) -> tuple[Array, Array]:
    """Runs positions as ``scan`` does, ``POSITIONS`` at a time from the first on, up to rounding.

    With ``A_t`` the product of a chunk's decays up to t, ``S_t = A_t S_0 + sum_{s <= t} A_t / A_s k_s u_s``. Without
    the delta rule u is v; with it ``u_t = beta_t (v_t - k_t A_t S_0 - sum_{s < t} k_t A_t / A_s k_s u_s)``, a
    triangular system (Yang 2024, 2406.06484, section 3; with decays 2412.06464, per channel 2510.26692). ``A_t / A_s``
    is a product of decays, from s to a border and from there to t, so that nothing overflows and decays may be 0.

    Memory of a gradient is a state per chunk.

    Args:
      state_BHNC: S.
      steps: of T positions.

    Returns:
      The state after them, and what each reads [B, T, H, C].
    """
    count = steps.v_BTHC.shape[1]
    size = min(POSITIONS, 1 << (count - 1).bit_length())
    chunks = jax.tree.map(lambda x: _cut(x, size), steps.padded(-count % size))
    state_BHNC, out = lax.scan(jax.checkpoint(_run_chunk), state_BHNC, chunks)  # [Z, B, H, L, C]
    out_BTHC = out.transpose(1, 0, 3, 2, 4).reshape(len(state_BHNC), -1, *out.shape[2:3], out.shape[-1])
    return state_BHNC, out_BTHC[:, :count]


def _cut(x_BTHX: Array, size: int) -> Array:
    """Cuts positions into chunks: [Z, B, H, L, X]."""
    rows, count, heads, width = x_BTHX.shape
    return x_BTHX.reshape(rows, count // size, size, heads, width).transpose(1, 0, 3, 2, 4)


def _run_chunk(state_BHNC: Array, steps: Steps) -> tuple[Array, Array]:
    """Runs a chunk, whose arrays are [B, H, L, X]."""
    q, k, v, decay = steps.q_BTGN, steps.k_BTGN, steps.v_BTHC, steps.decay_BTHN
    repeats = state_BHNC.shape[1] // k.shape[1]
    if decay.shape[-1] > 1:  # per key channel
        q, k, repeats = jnp.repeat(q, repeats, axis=1), jnp.repeat(k, repeats, axis=1), 1
        products, whole = decayed_products(jnp.stack([k, q]), k, decay)
    else:
        one = jnp.ones_like(decay)
        left, whole = decayed_products(one[None], one, decay)
        products = jnp.repeat(_product("xbgtn,bgsn->xbgts", jnp.stack([k, q]), k), repeats, axis=2) * left
    q, k = jnp.repeat(q, repeats, axis=1), jnp.repeat(k, repeats, axis=1)
    u = v
    if (beta := steps.beta_BTH1) is not None:
        stored = beta * (v - _product("bhln,bhnc->bhlc", k * whole.prefix, state_BHNC))
        u = _product("bhts,bhsc->bhtc", inverse(beta * products[0]), stored)
    out = _product("bhln,bhnc->bhlc", q * whole.prefix, state_BHNC) + _product("bhts,bhsc->bhtc", products[1], u)
    state = whole.prefix[..., -1, :, None] * state_BHNC + _product("bhln,bhlc->bhnc", k * whole.suffix, u)
    return state, out if steps.skip_BTHC is None else out + steps.skip_BTHC


def decayed_products(x_YBHLN: Array, k_BHLN: Array, decay_BHLN: Array) -> tuple[Array, _Decay]:
    """Computes ``x_t A_t / A_s k_s`` for s up to t, summed over N, and the decays of the whole chunk.

    Products of two halves meet at their border, those within a half at its own.

    Returns:
      [Y, B, H, L, L], zeros above the diagonal, and the decays.
    """
    done = jnp.sum(x_YBHLN * k_BHLN, axis=-1)[..., None, None]  # [..., L, 1, 1]
    decay, size = _Decay(decay_BHLN, jnp.ones_like(decay_BHLN)), 1
    while size < k_BHLN.shape[-2]:
        late, early = halves(x_YBHLN * decay.prefix, size)[1], halves(k_BHLN * decay.suffix, size)[0]
        between = _product("y...tn,...sn->y...ts", late, early)
        done, decay, size = _joined(done, between), decay.merged(size), 2 * size
    return done[..., 0, :, :], decay


def inverse(x_BHLL: Array) -> Array:
    """Computes the inverse of a triangular matrix with ones on its diagonal; of ``x`` what is below it counts.

    From the inverses of two blocks follows that of both together.
    """
    rows, heads, length, _ = x_BHLL.shape
    done, size = jnp.ones((rows, heads, length, 1, 1)), 1
    while size < length:
        blocks = x_BHLL.reshape(rows, heads, length // (2 * size), 2 * size, length // (2 * size), 2 * size)
        between = jnp.einsum("bhptps->bhpts", blocks)[..., size:, :size]
        first, second = done[..., ::2, :, :], done[..., 1::2, :, :]
        between = -_product("bhpxt,bhpts,bhpsy->bhpxy", second, between, first)
        done, size = _joined(done, between), 2 * size
    return done[..., 0, :, :]


def _joined(blocks: Array, between: Array) -> Array:
    """Joins pairs of triangular blocks [..., P, size, size] by what is between them."""
    first, second = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
    upper, lower = jnp.concatenate([first, jnp.zeros_like(first)], -1), jnp.concatenate([between, second], -1)
    return jnp.concatenate([upper, lower], axis=-2)


def halves(x: Array, size: int) -> tuple[Array, Array]:
    """Returns every other part of ``size`` positions [..., P, size, X], and those between."""
    parts = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return parts[..., 0, :, :], parts[..., 1, :, :]


def _product(rule: str, *factors: Any) -> Array:
    return jnp.einsum(rule, *factors, precision=lax.Precision.HIGHEST)
