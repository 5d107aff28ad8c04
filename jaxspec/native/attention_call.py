"""Attention of a few new positions per row to that row's paged cache: the call of the kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.native.product import kernels

Array = jax.Array
TARGET = "jaxspec_attention"
STORED = {"bfloat16": ("bfloat16", "uint16"), "float32": ("float32",)}  # caches by the dtype of products' factors


@dataclass(frozen=True)
class Where:
    """Where a row's entries lie, and which of them a query sees up to its own position.

    Attributes:
      page_BJ: int32, pages of each row.
      block: positions that are read at a time; divides the page.
      base: int32 scalar, added to every page id.
      span: most positions that a query sees, None for all; below 0 those from the last multiple of ``-span`` on.
      ring: whether a row's one page is addressed by position modulo its size.
      kept_BTS: which positions a query may see at all, as an indexer chooses them; None for all.
      start_B, path_BTJ: committed length of each row, and of the nodes from there on those that each query sees, by
        depth, itself the last and any after it; B may be 1. For trees, else None.
    """

    page_BJ: Array
    block: int
    base: Array | None = None
    span: int | None = None
    ring: bool = False
    kept_BTS: Array | None = None
    start_B: Array | None = None
    path_BTJ: Array | None = None


def obstacles(k_pages_PGZC: Array, *, dtype: jnp.dtype, block: int) -> list[str]:
    """Returns why the kernel cannot compute a case, each a sentence; empty if it can.

    Args:
      k_pages_PGZC: keys, or their shape and dtype.
      dtype: of the products' factors.
      block: positions that are read at a time.
    """
    (_, _, page, width), cached = k_pages_PGZC.shape, jnp.dtype(k_pages_PGZC.dtype).name
    reasons, factor = [], jnp.dtype(dtype).name
    if cached not in STORED.get(factor, ()):
        reasons.append(f"a cache of {cached} is not read for products of {factor}")
    if page % block or block % 2:
        reasons.append(f"pages of {page} positions are not whole blocks of {block}, an even number")
    if width % 2:
        reasons.append(f"keys have {width} channels, and are read two by two")
    return reasons


def attention(
    q_BTHC: Array,
    k_pages_PGZC: Array,
    v_pages_PGZC: Array | None,
    position_BT: Array,
    where: Where,
    *,
    scale: float,
    value_width: int,
    sinks_H: Array | None = None,
) -> Array:
    """Computes attention of T positions per row to that row's cache, in which they stand already.

    A row's result is bit for bit the same for any T, other rows, capacity, threads and instruction set, and that of a
    tree's node what its path gets as a chain. With bfloat16 it is also that of ``nn.attend.attend``.

    Args:
      q_BTHC: queries, rotated, not scaled.
      k_pages_PGZC: keys, of the dtype of the products' factors; uint16 are the bits of bfloat16.
      v_pages_PGZC: values [P, G, Z, C'], or None where a value is the beginning of its key.
      position_BT: int32, the last position that each query sees.
      where: entries and what is seen of them.
      scale: of the scores.
      value_width: C'.
      sinks_H: one more logit per head that takes probability and has no value.

    Returns:
      float32 [B, T, H, C'].
    """
    rows, count, heads, _ = q_BTHC.shape
    shape = jax.ShapeDtypeStruct((rows, count, heads, value_width), jnp.float32)
    if not q_BTHC.size:
        return jnp.zeros(shape.shape, shape.dtype)
    kernels()
    nothing = jnp.zeros(0, jnp.int32)
    is_tree = where.path_BTJ is not None and where.start_B is not None
    return jax.ffi.ffi_call(TARGET, shape)(
        q_BTHC.astype(jnp.float32),
        k_pages_PGZC,
        nothing if v_pages_PGZC is None else v_pages_PGZC,
        position_BT,
        where.page_BJ,
        jnp.zeros(1, jnp.int32) if where.base is None else where.base.reshape(1),
        where.start_B if is_tree else nothing,
        where.path_BTJ if is_tree else nothing,
        jnp.zeros(0) if sinks_H is None else sinks_H.astype(jnp.float32),
        jnp.zeros(0, bool) if where.kept_BTS is None else where.kept_BTS.reshape(rows * count, -1),
        scale=np.float64(scale),
        bytes=np.int64(k_pages_PGZC.dtype.itemsize),
        block=np.int64(where.block),
        span=np.int64(where.span or 0),
        ring=np.int64(where.ring),
    )
