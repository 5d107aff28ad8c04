"""The operation in plain JAX: every query's keys and values gathered, one softmax over all of them."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.where import Where


def first_seen(position: jax.Array, span: int) -> jax.Array:
    """Returns the first position that a query sees, or less than 0 for all.

    Args:
      position: of the query.
      span: most positions that it sees, itself included; below 0 it sees those from the last multiple of ``-span`` on.
    """
    return position - span + 1 if span > 0 else position - position % -span


def verify_attention(
    q_BTHC: jax.Array,
    k_pages_PGZC: jax.Array,
    v_pages_PGZC: jax.Array | None,
    position_BT: jax.Array,
    *,
    scale: float,
    dtype: jnp.dtype,
    value_width: int,
    sinks_H: jax.Array | None,
    span: int | None,
    ring: bool,
    where: Where,
) -> jax.Array:
    """As ``api.verify_attention``."""
    (rows, count), page = q_BTHC.shape[:2], k_pages_PGZC.shape[2]
    position_S = jnp.arange(where.room(k_pages_PGZC), dtype=jnp.int32)
    place_BTS = jnp.broadcast_to(position_S, (rows, count, position_S.size))
    if ring:  # position s stands for the last one at or before the query's own that lies in its slot
        place_BTS = position_BT[..., None] - (position_BT[..., None] - position_S) % page
    k_BTSGC = where.gather(k_pages_PGZC, place_BTS).astype(dtype)
    v_BTSGC = k_BTSGC[..., :value_width]
    if v_pages_PGZC is not None:
        v_BTSGC = where.gather(v_pages_PGZC, place_BTS).astype(dtype)
    seen_BTS = (place_BTS >= 0) & (place_BTS <= position_BT[..., None])
    if span is not None:
        seen_BTS &= place_BTS >= first_seen(position_BT, span)[..., None]
    return attend_gathered((q_BTHC * scale).astype(dtype), k_BTSGC, v_BTSGC, seen_BTS, sinks_H)


def attend_gathered(
    q_BTHC: jax.Array, k_BTSGC: jax.Array, v_BTSGC: jax.Array, seen_BTS: jax.Array, sinks_H: jax.Array | None
) -> jax.Array:
    """Computes one softmax over what was gathered for each query, float32 [B, T, H, C'].

    Args:
      q_BTHC: queries, scaled, of the products' dtype.
      k_BTSGC: keys of each query, of the same.
      v_BTSGC: values.
      seen_BTS: what it sees of them.
      sinks_H: one more logit per head that takes probability and has no value.
    """
    (rows, count, heads, width), kv_heads = q_BTHC.shape, k_BTSGC.shape[3]
    q_BTGRC = q_BTHC.reshape(rows, count, kv_heads, -1, width)
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    score = jnp.einsum("btgrc,btsgc->btgrs", q_BTGRC, k_BTSGC, **exact).reshape(rows, count, heads, -1)
    score = jnp.where(seen_BTS[:, :, None], score, -jnp.inf)
    top = jnp.max(score, axis=-1, keepdims=True)
    sink_H1 = None if sinks_H is None else sinks_H.astype(jnp.float32)[:, None]
    top = top if sink_H1 is None else jnp.maximum(top, sink_H1)
    prob = jnp.exp(score - top)
    total = jnp.sum(prob, axis=-1) + (0 if sink_H1 is None else jnp.exp(sink_H1 - top)[..., 0])
    weight = prob.astype(q_BTHC.dtype).reshape(rows, count, kv_heads, -1, prob.shape[-1])
    out = jnp.einsum("btgrs,btsgc->btgrc", weight, v_BTSGC, **exact)
    return out.reshape(rows, count, heads, -1) / total[..., None]
