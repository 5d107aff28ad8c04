"""The operation in plain JAX: every query's entries and latest positions gathered, one softmax over all of them."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.verify_attention.reference import attend_gathered
from pallas_kernels.where import Where


def chosen_attention(
    q_BTHC: jax.Array,
    pages_PGZC: jax.Array,
    count_BT: jax.Array,
    place_BTK: jax.Array | None,
    *,
    scale: float,
    dtype: jnp.dtype,
    value_width: int,
    recent: Any,
    sinks_H: jax.Array | None,
    where: Where,
) -> jax.Array:
    """As ``api.chosen_attention``."""
    if place_BTK is None:
        room = where.room(pages_PGZC)
        place_BTK = jnp.broadcast_to(jnp.arange(room, dtype=jnp.int32), (*count_BT.shape, room))
    k_BTSGC = where.gather(pages_PGZC, place_BTK)
    seen_BTS = jnp.arange(place_BTK.shape[2], dtype=jnp.int32) < count_BT[..., None]
    if recent is not None:
        position_BTR = recent.position_BT[..., None] - jnp.arange(recent.span - 1, -1, -1, dtype=jnp.int32)
        near_BTRGC = replace(where, path_BTJ=None).gather(recent.pages_PGZC, position_BTR)
        k_BTSGC = jnp.concatenate([near_BTRGC, k_BTSGC], axis=2)
        seen_BTS = jnp.concatenate([position_BTR >= 0, seen_BTS], axis=2)
    k_BTSGC = k_BTSGC.astype(dtype)
    return attend_gathered((q_BTHC * scale).astype(dtype), k_BTSGC, k_BTSGC[..., :value_width], seen_BTS, sinks_H)
