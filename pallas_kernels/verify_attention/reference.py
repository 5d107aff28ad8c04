"""The operation in plain JAX: every query's keys and values gathered, one softmax over all of them."""

import jax
import jax.numpy as jnp
from jax import lax


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
    start_B: jax.Array | None,
    path_BTJ: jax.Array | None,
    page_BJ: jax.Array,
) -> jax.Array:
    """As ``api.verify_attention``, with the pages of each row in ``page_BJ``."""
    rows, count, heads, width = q_BTHC.shape
    kv_heads, page = k_pages_PGZC.shape[1:3]
    position_S = jnp.arange(page_BJ.shape[1] * page, dtype=jnp.int32)
    place_BTS = jnp.broadcast_to(position_S, (rows, count, position_S.size))
    if ring:  # position s stands for the last one at or before the query's own that lies in its slot
        place_BTS = position_BT[..., None] - (position_BT[..., None] - position_S) % page
    at_BTS = place_BTS
    if path_BTJ is not None:
        assert start_B is not None, "a tree stands after the committed positions"
        at_BTS = at_depths(place_BTS, start_B, path_BTJ)
    page_BTS = jnp.take_along_axis(page_BJ[:, None], at_BTS // page % page_BJ.shape[1], axis=2, mode="clip")
    k_BTSGC = _values(k_pages_PGZC[page_BTS, :, at_BTS % page]).astype(dtype)
    v_BTSGC = k_BTSGC[..., :value_width]
    if v_pages_PGZC is not None:
        v_BTSGC = _values(v_pages_PGZC[page_BTS, :, at_BTS % page]).astype(dtype)
    q_BTGRC = (q_BTHC * scale).astype(dtype).reshape(rows, count, kv_heads, -1, width)
    exact = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    score = jnp.einsum("btgrc,btsgc->btgrs", q_BTGRC, k_BTSGC, **exact).reshape(rows, count, heads, -1)
    seen_BTS = (place_BTS >= 0) & (place_BTS <= position_BT[..., None])
    if span is not None:
        seen_BTS &= place_BTS >= first_seen(position_BT, span)[..., None]
    score = jnp.where(seen_BTS[:, :, None], score, -jnp.inf)
    top = jnp.max(score, axis=-1, keepdims=True)
    sink_H1 = None if sinks_H is None else sinks_H.astype(jnp.float32)[:, None]
    top = top if sink_H1 is None else jnp.maximum(top, sink_H1)
    prob = jnp.exp(score - top)
    total = jnp.sum(prob, axis=-1) + (0 if sink_H1 is None else jnp.exp(sink_H1 - top)[..., 0])
    weight = prob.astype(dtype).reshape(rows, count, kv_heads, -1, prob.shape[-1])
    out = jnp.einsum("btgrs,btsgc->btgrc", weight, v_BTSGC, **exact)
    return out.reshape(rows, count, heads, -1) / total[..., None]


def at_depths(place_BTS: jax.Array, start_B: jax.Array, path_BTJ: jax.Array) -> jax.Array:
    """Returns where each node of a tree finds what it sees at positions: its ancestors at those of their depths."""
    deepest = path_BTJ.shape[2]
    depth_BTS = place_BTS - start_B[:, None, None]
    path_BTJ = jnp.broadcast_to(path_BTJ, (*place_BTS.shape[:2], deepest))
    step_BTS = jnp.take_along_axis(path_BTJ, jnp.clip(depth_BTS, 0, deepest - 1), axis=2)
    is_own = (depth_BTS >= 0) & (depth_BTS < deepest)
    return jnp.where(is_own, start_B[:, None, None] + step_BTS, place_BTS)


def _values(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
