"""Steps of a recurrence: checks, choice of the implementation, and the call."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation
from pallas_kernels.recurrent_steps import kernel, reference
from pallas_kernels.select import Choice, UnsupportedKernel, choose

OP = "recurrent_steps"
WIDEST = 256  # key channels, all of which one program keeps


@dataclass(frozen=True)
class Positions:
    """What X positions do to the state S [H, N, C] of each row: ``S <- decay S + k v``, and read of it: ``S q``.

    With the delta rule ``v`` is stored as ``beta (v - S k)``, S decayed (Yang 2024, 2412.06464).

    Attributes:
      q_BXGN, k_BXGN: queries and keys, each for H / G heads that follow each other; float32, as all.
      v_BXHC: values.
      decay_BXHN: what is left of S, one number per head [B, X, H, 1] or one per key channel.
      beta_BXH1: strength of the delta rule, None for none.
      skip_BXHC: added to what is read, None for nothing.
    """

    q_BXGN: jax.Array
    k_BXGN: jax.Array
    v_BXHC: jax.Array
    decay_BXHN: jax.Array
    beta_BXH1: jax.Array | None = None
    skip_BXHC: jax.Array | None = None


@dataclass(frozen=True)
class Counts:
    """Which of the X positions run.

    Attributes:
      replay_B: how many of the first X - T run once more; nothing is read of them.
      kept_B: after how many of the last T, all of which run, the state is returned.
      last: T.
    """

    replay_B: jax.Array
    kept_B: jax.Array
    last: int


def recurrent_steps(
    state_BHNC: jax.Array, positions: Positions, counts: Counts, *, implementation: Implementation | Choice = "xla"
) -> tuple[jax.Array, jax.Array]:
    """Runs positions of each row one after another.

    A row's numbers are bitwise the same whatever the other rows, and however its positions are cut into calls.

    Args:
      state_BHNC: S of each row, float32.
      positions: what they do.
      counts: which of them run.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Returns:
      S after ``kept_B`` positions, and what each of the last T reads [B, T, H, C].

    Raises:
      UnsupportedKernel: shapes do not fit together.
    """
    _check(state_BHNC, positions, counts)
    if not isinstance(implementation, Choice):
        blocked = obstacles(state_BHNC.shape[2])
        implementation = choose(OP, case_name(state_BHNC.shape, positions), implementation, "", blocked)
    how = implementation.implementation
    if how == "xla":
        return reference.recurrent_steps(state_BHNC, positions, counts)
    return kernel.recurrent_steps(state_BHNC, positions, counts, implementation=how)


def obstacles(keys: int) -> list[str]:
    """Returns why the kernel cannot compute a case of so many key channels; empty if it can."""
    return [f"{keys} key channels, more than the {WIDEST} that one program keeps"] if keys > WIDEST else []


def case_name(shape: tuple[int, ...], positions: Positions) -> str:
    """The shape in words, for the choice's record."""
    rows, heads, keys, values = shape
    rule = "" if positions.beta_BXH1 is None else " delta rule"
    return f"B{rows} X{positions.v_BXHC.shape[1]} H{heads} N{keys} C{values}{rule}"


def _check(state_BHNC: jax.Array, p: Positions, counts: Counts) -> None:
    rows, heads, keys, values = state_BHNC.shape
    count, groups = p.v_BXHC.shape[1], p.k_BXGN.shape[2]
    wanted = {
        "q": (p.q_BXGN, [(rows, count, groups, keys)]), "k": (p.k_BXGN, [(rows, count, groups, keys)]),
        "v": (p.v_BXHC, [(rows, count, heads, values)]),
        "decay": (p.decay_BXHN, [(rows, count, heads, 1), (rows, count, heads, keys)]),
        "beta": (p.beta_BXH1, [(rows, count, heads, 1)]), "skip": (p.skip_BXHC, [(rows, count, heads, values)]),
        "replay_B": (counts.replay_B, [(rows,)]), "kept_B": (counts.kept_B, [(rows,)]),
    }  # fmt: skip
    for name, (array, shapes) in wanted.items():
        if array is not None and array.shape not in shapes:
            raise UnsupportedKernel(f"{OP}: {name} of {' or '.join(map(str, shapes))} needed, got {array.shape}")
    if heads % groups or not 0 < counts.last <= count:
        raise UnsupportedKernel(f"{OP}: {groups} groups of {heads} heads, the last {counts.last} of {count} positions")
    if any(x.dtype != jnp.float32 for x in (state_BHNC, p.q_BXGN, p.k_BXGN, p.v_BXHC, p.decay_BXHN)):
        raise UnsupportedKernel(f"{OP}: everything must be float32")
