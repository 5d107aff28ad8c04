"""Latents to cache in plain JAX."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cache_entries import places, stored, turn


def latents_to_cache(
    part_SMX: jax.Array, pages: jax.Array, latents: Any, *, params: Mapping[str, jax.Array],
    where: Mapping[str, jax.Array], query_SMR: jax.Array | None, layer: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array]:  # fmt: skip
    """As ``api.latents_to_cache``."""
    own = {name: (x if layer is None else x[layer]).astype(jnp.float32) for name, x in params.items()}
    x_MX = jnp.sum(part_SMX, axis=0) + own.get("bias", 0.0)
    latent_MR = _normed(x_MX[:, : latents.rank], own["norm"], latents.eps) * latents.scale
    key_MC = x_MX[:, latents.rank :]
    if "cos" in where:
        angles = where["cos"], where["sin"]
        key_MC = turn(key_MC, angles, 0, latents.turned, interleaved=latents.interleaved)
    rows = part_SMX.shape[1]
    page_M, slot_M = places(pages, where, rows, count=latents.count, base_pages=latents.base_pages)
    new_M1X = stored(jnp.concatenate([latent_MR, key_MC], axis=1), pages.dtype)[:, None]
    pages = pages.at[page_M, :, slot_M].set(new_M1X, mode="drop")
    if query_SMR is None:
        return None, pages
    return _normed(jnp.sum(query_SMR, axis=0) + own.get("q_bias", 0.0), own["q_norm"], latents.eps), pages


def _normed(x_MR: jax.Array, scale_R: jax.Array, eps: float) -> jax.Array:
    return x_MR * lax.rsqrt(jnp.mean(x_MR * x_MR, axis=-1, keepdims=True) + eps) * scale_R
