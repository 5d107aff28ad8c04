"""Attention of a few new positions per row to that row's paged cache: the call of the kernel."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.native.product import kernels

Array = jax.Array
TARGET = "jaxspec_attention"
STORED = {"bfloat16": ("bfloat16", "uint16"), "float32": ("float32",)}  # by the dtype of the products' factors


def obstacles(k_pages_PGZC: Array, *, dtype: jnp.dtype, block: int, selected: bool = False) -> list[str]:
    """Returns why the kernel cannot compute a case, each a sentence; empty if it can.

    Args:
      k_pages_PGZC: keys, or their shape and dtype.
      dtype: of the products' factors.
      block: positions that are read at a time.
      selected: whether queries attend to chosen positions, as an indexer chooses them.
    """
    (_, _, page, width), cached = k_pages_PGZC.shape, jnp.dtype(k_pages_PGZC.dtype).name
    reasons = []
    if selected:
        reasons.append("an indexer chooses what is attended to, and the kernel reads whole blocks only")
    if cached not in STORED.get(jnp.dtype(dtype).name, ()):
        reasons.append(f"a cache of {cached} is not computed with in {jnp.dtype(dtype).name}")
    if page % block or block % 2:
        reasons.append(f"pages of {page} positions are not whole blocks of {block}, an even number")
    if width % 2:
        reasons.append(f"keys of {width} channels are not pairs")
    return reasons


def attention(
    q_BTHC: Array,
    k_pages_PGZC: Array,
    v_pages_PGZC: Array | None,
    position_BT: Array,
    *,
    scale: float,
    dtype: jnp.dtype,
    value_width: int,
    page_BJ: Array,
    base: Array | None = None,
    sinks_H: Array | None = None,
    span: int | None = None,
    ring: bool = False,
    start_B: Array | None = None,
    path_BTJ: Array | None = None,
    block: int,
) -> Array:
    """Computes what ``pallas_kernels.verify_attention`` promises, a row's bits being the same in every company.

    With bfloat16 they are those of ``nn.attend.attend``, whose order of sums this follows.

    Args:
      q_BTHC, k_pages_PGZC, v_pages_PGZC, position_BT, scale, dtype, value_width: as there.
      page_BJ: pages of each row, to which ``base`` is added.
      base, sinks_H, span, ring, start_B, path_BTJ: as there.
      block: positions that are read at a time.
    """
    rows, count, heads, _ = q_BTHC.shape
    if not q_BTHC.size:
        return jnp.zeros((rows, count, heads, value_width), jnp.float32)
    kernels()
    nothing = jnp.zeros(0, jnp.int32)
    tree = path_BTJ is not None and start_B is not None
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((rows, count, heads, value_width), jnp.float32))
    return call(
        q_BTHC.astype(jnp.float32),
        k_pages_PGZC,
        nothing if v_pages_PGZC is None else v_pages_PGZC,
        position_BT,
        page_BJ,
        jnp.zeros(1, jnp.int32) if base is None else base.reshape(1),
        start_B if tree else nothing,
        path_BTJ if tree else nothing,
        jnp.zeros(0) if sinks_H is None else sinks_H.astype(jnp.float32),
        scale=np.float64(scale),
        bytes=np.int64(jnp.dtype(dtype).itemsize),
        block=np.int64(block),
        span=np.int64(span or 0),
        ring=np.int64(ring),
    )
