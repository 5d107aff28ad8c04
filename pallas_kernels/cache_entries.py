"""New entries of rows on their way into a cache: rotated, stored as it keeps them, at the page and slot of each."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import load


def places(
    pages: jax.Array, where: Mapping[str, jax.Array], rows: int, *, count: int, base_pages: int, ring: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns page and slot of every row's entry, in plain JAX.

    Args:
      pages: the cache [P, G, Z, C].
      where: see ``heads_to_cache``.
      rows: of the product.
      count: positions of a batch row.
      base_pages: multiplies ``base``.
      ring: whether a row's one page is addressed by position modulo its size.
    """
    size, position_M = pages.shape[2], where.get("position", jnp.arange(rows, dtype=jnp.int32))
    row_M = position_M // count
    entry_M = where["first"][row_M] + position_M % count
    if "table" in where:
        column_M = jnp.clip(entry_M // size, 0, where["table"].shape[1] - 1)
        page_M, slot_M = where["table"][row_M, column_M], entry_M % size
    else:
        page_M = where["row"][row_M] if "row" in where else row_M
        slot_M = entry_M % size if ring else entry_M
    page_M = page_M + where["base"][0] * base_pages if "base" in where else page_M
    outside = np.int32(size)  # a negative slot would count from the end
    return page_M, jnp.where(slot_M < 0, outside, slot_M)


def place(
    ref: Mapping[str, Any], m: jax.Array, size: int, *, count: int, base_pages: int, ring: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the same of one row inside a kernel, whose references are ``where``; ``size`` is a page's."""
    position = ref["position"][m] if "position" in ref else m
    row = position // count
    entry = ref["first"][row] + position % count
    if "table" in ref:
        column = jnp.clip(entry // size, 0, ref["table"].shape[1] - 1)
        page, slot = ref["table"][row, column], entry % size
    else:
        page = ref["row"][row] if "row" in ref else row
        slot = entry % size if ring else entry
    return (page + ref["base"][0] * base_pages if "base" in ref else page), slot


def stored(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns numbers as a cache keeps them; uint16 are the bits of bfloat16."""
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) if dtype == jnp.uint16 else x.astype(dtype)


def turn(x: jax.Array, angles: tuple[jax.Array, jax.Array], first: int, turned: int, *, interleaved: bool) -> jax.Array:
    """Rotates ``turned`` channels of rows [M, ..., C] from ``first`` on, in plain JAX.

    Args:
      x: rows.
      angles: cosines and sines [M, turned / 2].
      first: channel.
      turned: how many are rotated.
      interleaved: whether pairs are (2i, 2i + 1) instead of (i, i + turned / 2).
    """
    pair_F = np.arange(turned // 2)
    one_F, other_F = (2 * pair_F, 2 * pair_F + 1) if interleaved else (pair_F, pair_F + turned // 2)
    cos, sin = (angle.reshape(len(angle), *[1] * (x.ndim - 2), -1) for angle in angles)
    a, b = x[..., first + one_F], x[..., first + other_F]
    x = x.at[..., first + one_F].set(a * cos - b * sin)
    return x.at[..., first + other_F].set(b * cos + a * sin)


def rotated(
    x_JC: jax.Array, read: Callable[[jax.Array], jax.Array], ref: Mapping[str, Any], m: Any, place_C: jax.Array,
    turned: int, *, interleaved: bool,
) -> jax.Array:  # fmt: skip
    """Rotates channels inside a kernel: every channel reads its partner, and the angle that they share.

    Args:
      x_JC: heads of one row, or the rows of one head.
      read: makes them of other channels, named by their places among the rotated ones.
      ref: ``cos`` and ``sin`` [M, turned / 2].
      m: the row, or the rows [J, 1].
      place_C: place of each channel among the rotated ones; what is outside stays as it is.
      turned: how many are rotated.
      interleaved: whether pairs are (2i, 2i + 1) instead of (i, i + turned / 2).
    """
    inside_C, half = (place_C >= 0) & (place_C < turned), turned // 2
    if interleaved:
        is_first_C, partner_C, pair_C = place_C % 2 == 0, place_C ^ 1, place_C // 2
    else:
        is_first_C = place_C < half
        partner_C = jnp.where(is_first_C, place_C + half, place_C - half)
        pair_C = jnp.where(is_first_C, place_C, place_C - half)
    partner_JC = read(jnp.where(inside_C, partner_C, place_C))
    cos_JC, sin_JC = (_angles(ref[name], m, pair_C, inside_C) for name in ("cos", "sin"))
    signed_JC = jnp.where(is_first_C[None], -sin_JC, sin_JC)
    return jnp.where(inside_C[None], x_JC * cos_JC + partner_JC * signed_JC, x_JC)


def _angles(ref: Any, m: Any, pair_C: jax.Array, inside_C: jax.Array) -> jax.Array:
    if not jnp.ndim(m):
        return load(ref.at[m, pair_C], mask=inside_C, other=0.0)[None]
    mask = inside_C[None] & (m < ref.shape[0])
    return load(ref.at[m, pair_C[None]], mask=mask, other=0.0)
