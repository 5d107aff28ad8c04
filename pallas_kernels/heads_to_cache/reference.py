"""Heads to cache in plain JAX."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def heads_to_cache(
    part_SMN: jax.Array, pages: tuple[jax.Array, jax.Array], heads: Any, *, params: Mapping[str, jax.Array],
    where: Mapping[str, jax.Array], layer: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """As ``api.heads_to_cache``."""
    own = {name: (x if layer is None else x[layer]).astype(jnp.float32) for name, x in params.items()}
    rows, group = part_SMN.shape[1], heads.group
    x_MGQC = jnp.sum(part_SMN, axis=0).reshape(rows, heads.kv_heads, group + 2, heads.width)
    x_MGQC = x_MGQC + own["bias"] if "bias" in own else x_MGQC
    q, k, v = x_MGQC[:, :, :group], x_MGQC[:, :, group : group + 1], x_MGQC[:, :, group + 1]
    q, k = (_normed(x, own.get(name), heads) for x, name in ((q, "q_norm"), (k, "k_norm")))
    if heads.turned:
        q, k = (_turned(x, where["cos"], where["sin"], heads) for x in (q, k))
    page_M, slot_M = _places(pages[0], heads, where, rows)
    k_pages, v_pages = (
        page.at[page_M, :, slot_M].set(_stored(new, page.dtype), mode="drop")
        for page, new in zip(pages, (k[:, :, 0], v), strict=True)
    )
    return q.reshape(rows, -1, heads.width), k_pages, v_pages


def _normed(x: jax.Array, scale_C: jax.Array | None, heads: Any) -> jax.Array:
    if scale_C is None:
        return x
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + heads.eps) * (scale_C + heads.offset)


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array, heads: Any) -> jax.Array:
    first, half = heads.width - heads.turned if heads.last else 0, heads.turned // 2
    pair_F = np.arange(half)
    one_F, other_F = (2 * pair_F, 2 * pair_F + 1) if heads.interleaved else (pair_F, pair_F + half)
    a, b, cos, sin = x[..., first + one_F], x[..., first + other_F], cos[:, None, None], sin[:, None, None]
    x = x.at[..., first + one_F].set(a * cos - b * sin)
    return x.at[..., first + other_F].set(b * cos + a * sin)


def _places(pages: jax.Array, heads: Any, where: Mapping[str, jax.Array], rows: int) -> tuple[jax.Array, jax.Array]:
    size, position_M = pages.shape[2], where.get("position", jnp.arange(rows, dtype=jnp.int32))
    row_M = position_M // heads.count
    entry_M = where["first"][row_M] + position_M % heads.count
    if "table" in where:
        column_M = jnp.clip(entry_M // size, 0, where["table"].shape[1] - 1)
        page_M, slot_M = where["table"][row_M, column_M], entry_M % size
    else:
        page_M = where["row"][row_M] if "row" in where else row_M
        slot_M = entry_M % size if heads.ring else entry_M
    page_M = page_M + where["base"][0] * heads.base_pages if "base" in where else page_M
    outside = np.int32(size)  # a negative slot would count from the end
    return page_M, jnp.where(slot_M < 0, outside, slot_M)


def _stored(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) if dtype == jnp.uint16 else x.astype(dtype)
