"""The Pallas body: one program takes one kv head of one row from the product to the cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, whole
from pallas_kernels.cache_entries import place, rotated, stored
from pallas_kernels.steady import total

PER_WARP = 512


@dataclass(frozen=True)
class _Body:
    """Static facts of the kernel; heads and channels of a tile are powers of two."""

    heads: Any
    tall: int
    wide: int
    stacked: bool
    how: Implementation


def heads_to_cache(
    part_SMN: jax.Array, pages: tuple[jax.Array, jax.Array], heads: Any, *, params: Mapping[str, jax.Array],
    where: Mapping[str, jax.Array], layer: jax.Array | None, implementation: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """As ``api.heads_to_cache``."""
    rows = part_SMN.shape[1]
    split = (part_SMN.shape[0], rows, heads.kv_heads, heads.group + 2, heads.width)
    operands = {"k": pages[0], "v": pages[1], "part": part_SMN.reshape(split), **params, **where}
    if layer is not None:
        operands["layer"] = layer.astype(jnp.int32).reshape(1)
    tall, wide = _power(heads.group + 2), _power(heads.width)
    query = jax.ShapeDtypeStruct((rows, heads.kv_heads, heads.group, heads.width), jnp.float32)
    shapes = [*(jax.ShapeDtypeStruct(page.shape, page.dtype) for page in pages), query]
    k_pages, v_pages, q_MGRC = launch(
        partial(_one, _Body(heads, tall, wide, layer is not None, implementation), tuple(operands)),
        *operands.values(),
        name="heads_to_cache",
        grid=(rows, heads.kv_heads),
        in_specs=[whole(x.shape) for x in operands.values()],
        out_specs=[whole(s.shape) for s in shapes],
        out_shape=shapes,
        how=Launch(num_warps=max(1, min(8, tall * wide // PER_WARP)), num_stages=1),
        implementation=implementation,
        aliases={0: 0, 1: 1},
    )
    return q_MGRC.reshape(rows, -1, heads.width), k_pages, v_pages


def numbers(heads: Any) -> int:
    """Numbers in the tile of one program."""
    return _power(heads.group + 2) * _power(heads.width)


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _one(body: _Body, names: tuple[str, ...], *refs: Any) -> None:
    ref, (k_ref, v_ref, q_ref) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    h, m, g = body.heads, program_id(0), program_id(1)
    head_J, channel_C = jnp.arange(body.tall, dtype=jnp.int32), jnp.arange(body.wide, dtype=jnp.int32)
    read = partial(_read, body, ref, m, g, head_J)
    x_JC = read(channel_C)
    inverse_J1 = None
    if "q_norm" in ref:
        inverse_J1 = lax.rsqrt(total(x_JC * x_JC, 1, body.how) / np.float32(h.width) + np.float32(h.eps))[:, None]
    out_JC = _scaled(body, ref, x_JC, inverse_J1, head_J, channel_C)
    if h.turned:
        out_JC = _turned(body, ref, m, out_JC, lambda c: _scaled(body, ref, read(c), inverse_J1, head_J, c), channel_C)
    is_value_J = head_J == h.group + 1
    out_JC = jnp.where(is_value_J[:, None], x_JC, out_JC)
    fits_C = channel_C < h.width
    # Beside the last one where masked: an interpreted store reads and writes those, too.
    is_query_JC = (head_J < h.group)[:, None] & fits_C[None]
    head_JC = jnp.where(is_query_JC, head_J[:, None], h.group)
    store(q_ref.at[m, g, head_JC, channel_C[None]], out_JC, mask=is_query_JC)
    page, slot = place(ref, m, k_ref.shape[2], count=h.count, base_pages=h.base_pages, ring=h.ring)
    inside = (page >= 0) & (page < k_ref.shape[0]) & (slot >= 0) & (slot < k_ref.shape[2])
    for own, pages_ref in ((h.group, k_ref), (h.group + 1, v_ref)):
        is_own_JC = (head_J == own)[:, None] & fits_C[None] & inside
        page_JC = jnp.where(is_own_JC, page, pages_ref.shape[0])
        at = pages_ref.at[page_JC, g, jnp.broadcast_to(slot, page_JC.shape), channel_C[None]]
        store(at, stored(out_JC, pages_ref.dtype), mask=is_own_JC)


def _read(body: _Body, ref: dict[str, Any], m, g, head_J, channel_C) -> jax.Array:
    """Sums of the product in its parts' order, and the bias."""
    h, index = body.heads, (head_J[:, None], channel_C[None])
    mask = (head_J < h.group + 2)[:, None] & (channel_C < h.width)[None]
    x_JC = load(ref["part"].at[(0, m, g, *index)], mask=mask, other=0.0)
    for s in range(1, ref["part"].shape[0]):
        x_JC = x_JC + load(ref["part"].at[(s, m, g, *index)], mask=mask, other=0.0)
    if "bias" not in ref:
        return x_JC
    return x_JC + load(ref["bias"].at[(*_lead(body, ref), g, *index)], mask=mask, other=0.0).astype(jnp.float32)


def _lead(body: _Body, ref: dict[str, Any]) -> tuple[Any, ...]:
    return (ref["layer"][0],) if body.stacked else ()


def _scaled(body: _Body, ref: dict[str, Any], x_JC, inverse_J1, head_J, channel_C) -> jax.Array:
    if inverse_J1 is None:
        return x_JC
    scale = {
        name: load(ref[name].at[(*_lead(body, ref), channel_C)], mask=channel_C < body.heads.width, other=0.0)
        for name in ("q_norm", "k_norm")
    }
    own_JC = jnp.where((head_J < body.heads.group)[:, None], scale["q_norm"][None], scale["k_norm"][None])
    return x_JC * inverse_J1 * (own_JC.astype(jnp.float32) + np.float32(body.heads.offset))


def _turned(body: _Body, ref: dict[str, Any], m, x_JC, read, channel_C) -> jax.Array:
    h = body.heads
    first = h.width - h.turned if h.last else 0
    return rotated(
        x_JC, lambda place_C: read(first + place_C), ref, m, channel_C - first, h.turned, interleaved=h.interleaved
    )
