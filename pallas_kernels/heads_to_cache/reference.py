"""Heads to cache in plain JAX."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_entries import places, stored, turn


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
        first, angles = heads.width - heads.turned if heads.last else 0, (where["cos"], where["sin"])
        q, k = (turn(x, angles, first, heads.turned, interleaved=heads.interleaved) for x in (q, k))
    page_M, slot_M = places(pages[0], where, rows, count=heads.count, base_pages=heads.base_pages, ring=heads.ring)
    k_pages, v_pages = (
        page.at[page_M, :, slot_M].set(stored(new, page.dtype), mode="drop")
        for page, new in zip(pages, (k[:, :, 0], v), strict=True)
    )
    return q.reshape(rows, -1, heads.width), k_pages, v_pages


def _normed(x: jax.Array, scale_C: jax.Array | None, heads: Any) -> jax.Array:
    if scale_C is None:
        return x
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + heads.eps) * (scale_C + heads.offset)
