"""Where entries go, for cases of kernels that write a cache: shapes and random values."""

from typing import Any

import jax
import jax.numpy as jnp


def abstract_where(rows: int, *, table: int, layers: int, packed: int, angles: tuple[int, int]) -> dict[str, Any]:
    """Returns shapes and dtypes of what ``heads_to_cache`` takes as ``where``.

    Args:
      rows: B.
      table: pages of a row that shares a pool, 0 for a page of its own.
      layers: that share the pages, 0 for no stack.
      packed: rows of the product, 0 for all positions in order.
      angles: rows of the product, and pairs of channels that are rotated, 0 for none.
    """
    whole = jnp.int32
    where: dict[str, Any] = {"first": jax.ShapeDtypeStruct((rows,), whole)}
    if table:
        where["table"] = jax.ShapeDtypeStruct((rows, table), whole)
    if layers:
        where["base"] = jax.ShapeDtypeStruct((1,), whole)
    if packed:
        where["position"] = jax.ShapeDtypeStruct((packed,), whole)
    if angles[1]:
        where |= {name: jax.ShapeDtypeStruct(angles, jnp.float32) for name in ("cos", "sin")}
    return where


def random_where(key: jax.Array, like: dict[str, Any], *, page: int, count: int, base: int) -> dict[str, Any]:
    """Returns values of these shapes; rows stand at different places.

    Args:
      key: of the random numbers.
      like: shapes.
      page: entries of a page.
      count: positions of a row.
      base: the value of ``base``.
    """
    rows, table = like["first"].shape[0], like["table"].shape[1] if "table" in like else 0
    room, (pages, turns) = page * max(table, 1), jax.random.split(key)
    given: dict[str, Any] = {"first": (room - count - 7 * jnp.arange(rows, dtype=jnp.int32)) % room}
    if table:
        given["table"] = jax.random.permutation(pages, rows * table).reshape(rows, table).astype(jnp.int32)
    if "base" in like:
        given["base"] = jnp.full(1, base, jnp.int32)
    if "position" in like:
        given["position"] = jnp.arange(like["position"].shape[0], dtype=jnp.int32) * 2
    if "cos" in like:
        angle = jax.random.normal(turns, like["cos"].shape)
        given |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    return given
