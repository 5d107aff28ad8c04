"""Named cases of steps of recurrences: small ones of every kind, and layers of published models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.recurrent_steps.api import Counts, Positions, recurrent_steps


@dataclass(frozen=True)
class Sizes:
    """A shape of the operation.

    Attributes:
      rows, last, replays: B, T, and the positions before those that may run once more.
      heads, groups, keys, values: H, G, N and C.
      by_channel: whether there is a decay per key channel.
      delta: whether values are stored by the delta rule.
      skip: whether something is added to what is read.
    """

    rows: int
    last: int
    replays: int
    heads: int
    groups: int
    keys: int
    values: int
    by_channel: bool = False
    delta: bool = True
    skip: bool = False


PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_next": {"heads": 32, "groups": 16, "keys": 128, "values": 128},
    "kimi_linear": {"heads": 32, "groups": 32, "keys": 128, "values": 128, "by_channel": True},
    "nemotron_3_nano": {"heads": 64, "groups": 8, "keys": 128, "values": 64, "delta": False, "skip": True},
    "minimax_01": {"heads": 64, "groups": 64, "keys": 128, "values": 128, "delta": False},
}


def _abstract(s: Sizes) -> tuple[Any, ...]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((s.rows, *shape), jnp.float32)

    count = s.replays + s.last
    number_B = jax.ShapeDtypeStruct((s.rows,), jnp.int32)
    return (
        array(s.heads, s.keys, s.values), array(count, s.groups, s.keys), array(count, s.groups, s.keys),
        array(count, s.heads, s.values), array(count, s.heads, s.keys if s.by_channel else 1),
        array(count, s.heads, 1) if s.delta else None, array(count, s.heads, s.values) if s.skip else None,
        number_B, number_B,
    )  # fmt: skip


def _random(s: Sizes, key: jax.Array) -> tuple[Any, ...]:
    *like, _, _ = _abstract(s)
    keys = jax.random.split(key, len(like) + 2)
    state, q, k, v, decay, beta, skip = (
        None if x is None else jax.random.normal(own, x.shape, x.dtype) for own, x in zip(keys, like, strict=False)
    )
    assert k is not None
    assert decay is not None
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    replay_B = jax.random.randint(keys[-2], (s.rows,), 0, s.replays + 1, jnp.int32)
    kept_B = jax.random.randint(keys[-1], (s.rows,), 0, s.last + 1, jnp.int32)
    beta = None if beta is None else jax.nn.sigmoid(beta)
    return state, q, k, v, jax.nn.sigmoid(decay), beta, skip, replay_B, kept_B


def _call(s: Sizes, implementation: Any) -> Callable[..., Any]:
    def call(state: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, skip: Any, replay_B: Any, kept_B: Any) -> Any:
        positions, counts = Positions(q, k, v, decay, beta, skip), Counts(replay_B, kept_B, s.last)
        return recurrent_steps(state, positions, counts, implementation=implementation)

    return call


def _case(name: str, size: Literal["tiny", "real"], s: Sizes) -> Case:
    # Sums over keys in another order, once per position.
    return Case(name, size, partial(_abstract, s), partial(_random, s), partial(_call, s), 5e-6)


def published(name: str, rows: int, last: int) -> Case:
    """A layer of a published model, with as many drafts that may run once more as positions after the first."""
    return _case(f"{name}_B{rows}_T{last}", "real", Sizes(rows, last, last - 1, **PUBLISHED[name]))


CASES: tuple[Case, ...] = (
    _case("delta", "tiny", Sizes(3, 4, 3, 4, 2, 5, 7)),
    _case("delta_by_channel", "tiny", Sizes(2, 3, 0, 2, 2, 16, 16, by_channel=True)),
    _case("mamba", "tiny", Sizes(2, 2, 1, 6, 2, 8, 20, delta=False, skip=True)),
    _case("lightning", "tiny", Sizes(1, 5, 2, 3, 3, 8, 8, delta=False)),
    *(published(name, rows, last) for name in PUBLISHED for rows, last in ((1, 1), (8, 8))),
)
