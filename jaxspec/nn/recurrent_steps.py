"""Steps of a recurrence one after another: what positions do to a state, rounded alike however a text is cut."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.nn.steady import rounded
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array


@pytree
class Steps:
    """What T positions do to the state, and read of it.

    Attributes:
      q_BTGN, k_BTGN: queries and keys, each for H / G heads that follow each other.
      v_BTHC: values.
      decay_BTHN: what is left of S, one number per head or one per key channel.
      beta_BTH1: strength of the delta rule, which stores the error of what S says; None stores the value itself.
      skip_BTHC: added to what is read.
    """

    q_BTGN: Array
    k_BTGN: Array
    v_BTHC: Array
    decay_BTHN: Array
    beta_BTH1: Array | None = None
    skip_BTHC: Array | None = None

    def only(self, counts_BT: Array) -> "Steps":
        """Returns the steps, where the others leave the state as it is."""
        counts = counts_BT[..., None, None]
        beta = None if self.beta_BTH1 is None else jnp.where(counts, self.beta_BTH1, 0.0)
        value, decay = jnp.where(counts, self.v_BTHC, 0.0), jnp.where(counts, self.decay_BTHN, 1.0)
        return replace(self, v_BTHC=value, decay_BTHN=decay, beta_BTH1=beta)

    def padded(self, count: int) -> "Steps":
        """Returns the steps with ``count`` more at the end, which leave the state as it is."""

        def pad(x: Array, value: float = 0.0) -> Array:
            return jnp.pad(x, ((0, 0), (0, count), (0, 0), (0, 0)), constant_values=value)

        return replace(jax.tree.map(pad, self), decay_BTHN=pad(self.decay_BTHN, 1.0))


def scan(state_BHNC: Array, steps: Steps, zero: Array) -> tuple[Array, Array]:
    """Runs positions one after another: the state after them, and what each reads [B, T, H, C]."""

    def one(state: Array, step: Steps) -> tuple[Array, Array]:
        return advance(state, step, zero)

    if steps.v_BTHC.shape[1] == 1:
        state, out_BHC = one(state_BHNC, jax.tree.map(lambda x: x[:, 0], steps))
        return state, out_BHC[:, None]
    state, out_TBHC = lax.scan(one, state_BHNC, jax.tree.map(lambda x: x.swapaxes(0, 1), steps))
    return state, out_TBHC.swapaxes(0, 1)


def advance(state_BHNC: Array, step: Steps, zero: Array) -> tuple[Array, Array]:
    """Runs one position: ``S <- decay S + k v``, or with the delta rule ``k beta (v - S k)``; then reads ``S q``.

    Gated delta rule: Yang 2024 (2412.06464); a decay per key channel: Kimi (2510.26692); without delta rule: Mamba-2
    (Dao 2024, 2405.21060) and lightning attention (Qin 2024, 2405.17381).

    Args:
      state_BHNC: S.
      step: of one position, without its axis.
      zero: see ``rounded``.
    """
    heads = state_BHNC.shape[1]
    q, k = (jnp.repeat(x, heads // x.shape[1], axis=1)[..., None] for x in (step.q_BTGN, step.k_BTGN))
    state, value = rounded(state_BHNC * step.decay_BTHN[..., None], zero), step.v_BTHC
    if step.beta_BTH1 is not None:
        value = step.beta_BTH1 * (value - _sum_over_keys(rounded(state * k, zero)))
    state = state + rounded(k * value[:, :, None], zero)
    out = _sum_over_keys(rounded(state * q, zero))
    return state, out if step.skip_BTHC is None else out + rounded(step.skip_BTHC, zero[..., 0])


def _sum_over_keys(x_BHNC: Array) -> Array:
    """Sum over N in a fixed order: halves are added, so that each addition is one of long rows."""
    while x_BHNC.shape[2] > 1:
        half = (x_BHNC.shape[2] + 1) // 2
        low, high = x_BHNC[:, :, :half], x_BHNC[:, :, half:]
        if x_BHNC.shape[2] % 2:
            high = jnp.pad(high, ((0, 0), (0, 0), (0, 1), (0, 0)))
        x_BHNC = low + high
    return x_BHNC[:, :, 0]
