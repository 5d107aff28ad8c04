"""The Pallas body: one program runs some value channels of one head of one row, its part of the state in registers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, whole
from pallas_kernels.steady import total

NUMBERS = 4096  # of the state in one program
FEWEST = 16  # value channels of one, whose loads then are whole sectors


@dataclass(frozen=True)
class _Body:
    """Static facts of the kernel; channels are filled up to powers of two."""

    keys: int
    values: int
    wide: int
    part: int
    each: int
    replays: int
    how: Implementation


def recurrent_steps(
    state_BHNC: jax.Array, positions: Any, counts: Any, *, implementation: Implementation
) -> tuple[jax.Array, jax.Array]:
    """As ``api.recurrent_steps``."""
    p, (rows, heads, keys, values) = positions, state_BHNC.shape
    operands = {"state": state_BHNC, "q": p.q_BXGN, "k": p.k_BXGN, "v": p.v_BXHC, "decay": p.decay_BXHN}
    operands |= {} if p.beta_BXH1 is None else {"beta": p.beta_BXH1}
    operands |= {} if p.skip_BXHC is None else {"skip": p.skip_BXHC}
    operands |= {"replay": counts.replay_B.astype(jnp.int32), "kept": counts.kept_B.astype(jnp.int32)}
    shapes = {
        "new": jax.ShapeDtypeStruct(state_BHNC.shape, jnp.float32),
        "out": jax.ShapeDtypeStruct((rows, counts.last, heads, values), jnp.float32),
    }
    wide, part = (1 << (size - 1).bit_length() for size in (keys, values))
    while part > FEWEST and part * wide > NUMBERS:
        part //= 2
    replays = p.v_BXHC.shape[1] - counts.last
    body = _Body(keys, values, wide, part, heads // p.k_BXGN.shape[2], replays, implementation)
    new, out = launch(
        partial(_part_of_head, body, (*operands, *shapes)),
        *operands.values(),
        name="recurrent_steps",
        grid=(rows, heads, -(-values // part)),
        in_specs=[whole(x.shape) for x in operands.values()],
        out_specs=[whole(s.shape) for s in shapes.values()],
        out_shape=list(shapes.values()),
        how=Launch(num_warps=max(1, min(4, wide * part // 1024)), num_stages=1),
        implementation=implementation,
    )
    return new, out


def _part_of_head(body: _Body, names: tuple[str, ...], *refs: Any) -> None:
    ref = dict(zip(names, refs, strict=True))
    b, h = program_id(0), program_id(1)
    key_N = jnp.arange(body.wide, dtype=jnp.int32)
    value_C = program_id(2) * body.part + jnp.arange(body.part, dtype=jnp.int32)
    is_key_N, is_value_C = key_N < body.keys, value_C < body.values
    inside_NC = is_key_N[:, None] & is_value_C[None]
    replays, kept = ref["replay"][b], ref["kept"][b]
    # Zero, of which no compiler of an interpreted body knows it: replays are never negative.
    zero = jnp.minimum(replays, 0)

    def rounded(x: jax.Array) -> jax.Array:
        """A product, rounded before it is added; Triton's own products say so to ptxas (``mul.rn``)."""
        if body.how == "triton":
            return x
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ zero, jnp.float32)

    def keys_of(name: str, x: jax.Array) -> jax.Array:
        return load(ref[name].at[b, x, h // body.each, key_N], mask=is_key_N, other=0.0)

    def values_of(name: str, x: jax.Array) -> jax.Array:
        return load(ref[name].at[b, x, h, value_C], mask=is_value_C, other=0.0)

    def one(i: jax.Array, state_NC: jax.Array) -> jax.Array:
        t = i - replays  # of the last positions; negative for those that run once more
        x = jnp.where(t < 0, i, body.replays + t)
        if ref["decay"].shape[3] == 1:
            decay_N1 = ref["decay"][b, x, h, 0]
        else:
            decay_N1 = load(ref["decay"].at[b, x, h, key_N], mask=is_key_N, other=1.0)[:, None]
        k_N1, value = keys_of("k", x)[:, None], values_of("v", x)
        state_NC = rounded(state_NC * decay_N1)
        if "beta" in ref:
            value = ref["beta"][b, x, h, 0] * (value - total(rounded(state_NC * k_N1), 0, body.how))
        state_NC = state_NC + rounded(k_N1 * value[None])
        out_C = total(rounded(state_NC * keys_of("q", x)[:, None]), 0, body.how)
        if "skip" in ref:
            out_C = out_C + rounded(values_of("skip", x))
        # Nothing is read of those that run once more.
        store(ref["out"].at[b, jnp.maximum(t, 0), h, value_C], out_C, mask=is_value_C & (t >= 0))
        return state_NC

    place = (b, h, key_N[:, None], value_C[None])
    state_NC = load(ref["state"].at[place], mask=inside_NC, other=0.0)
    # In one loop the store would be under a condition, and its addresses would lie in registers beside the state.
    state_NC = lax.fori_loop(np.int32(0), replays + kept, one, state_NC)
    store(ref["new"].at[place], state_NC, mask=inside_NC)
    lax.fori_loop(replays + kept, replays + np.int32(ref["out"].shape[1]), one, state_NC)
