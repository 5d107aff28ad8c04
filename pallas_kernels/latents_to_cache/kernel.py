"""The Pallas body: one program takes one row's latent from its product to the cache, another its low-rank query."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, when, whole
from pallas_kernels.cache_entries import place, rotated, stored
from pallas_kernels.steady import total

PER_WARP = 512


@dataclass(frozen=True)
class _Body:
    """Static facts of the kernel."""

    latents: Any
    stacked: bool
    how: Implementation


def latents_to_cache(
    part_SMX: jax.Array, pages: jax.Array, latents: Any, *, params: Mapping[str, jax.Array],
    where: Mapping[str, jax.Array], query_SMR: jax.Array | None, layer: jax.Array | None,
    implementation: Implementation,
) -> tuple[jax.Array | None, jax.Array]:  # fmt: skip
    """As ``api.latents_to_cache``."""
    rows, widest = part_SMX.shape[1], latents.rank
    operands = {"pages": pages, "part": part_SMX, **params, **where}
    shapes = [jax.ShapeDtypeStruct(pages.shape, pages.dtype)]
    if query_SMR is not None:
        operands["query"], widest = query_SMR, max(widest, query_SMR.shape[2])
        shapes.append(jax.ShapeDtypeStruct(query_SMR.shape[1:], jnp.float32))
    if layer is not None:
        operands["layer"] = layer.astype(jnp.int32).reshape(1)
    new_pages, *low = launch(
        partial(_row, _Body(latents, layer is not None, implementation), tuple(operands)),
        *operands.values(),
        name="latents_to_cache",
        grid=(rows, len(shapes)),
        in_specs=[whole(x.shape) for x in operands.values()],
        out_specs=[whole(s.shape) for s in shapes],
        out_shape=shapes,
        how=Launch(num_warps=max(1, min(8, _power(widest) // PER_WARP)), num_stages=1),
        implementation=implementation,
        aliases={0: 0},
    )
    return low[0] if low else None, new_pages


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _row(body: _Body, names: tuple[str, ...], *refs: Any) -> None:
    ref, outs, m, turn = dict(zip(names, refs, strict=False)), refs[len(names) :], program_id(0), program_id(1)
    if "query" not in ref:
        _latent(body, ref, outs[0], m)
        return
    when(turn == 0)(partial(_latent, body, ref, outs[0], m))
    when(turn == 1)(partial(_query, body, ref, outs[1], m))


def _query(body: _Body, ref: dict[str, Any], out_ref: Any, m: jax.Array) -> None:
    width = out_ref.shape[1]
    channel = jnp.arange(_power(width), dtype=jnp.int32)
    x = _normed(body, ref, _read(body, ref, ("query", "q_bias"), m, channel, width), ("q_norm", channel, width))
    store(out_ref.at[m, channel], x, mask=channel < width)


def _latent(body: _Body, ref: dict[str, Any], pages_ref: Any, m: jax.Array) -> None:
    s, pages = body.latents, pages_ref.shape[0]
    channel = jnp.arange(_power(s.rank), dtype=jnp.int32)
    x = _normed(body, ref, _read(body, ref, ("part", "bias"), m, channel, s.rank), ("norm", channel, s.rank))
    further = jnp.arange(_power(s.turned), dtype=jnp.int32)

    def read(place_C: jax.Array) -> jax.Array:
        return _read(body, ref, ("part", "bias"), m, s.rank + place_C, s.rank + s.turned)[None]

    key = read(further)
    if "cos" in ref:
        key = rotated(key, read, ref, m, further, s.turned, interleaved=s.interleaved)
    page, slot = place(ref, m, pages_ref.shape[2], count=s.count, base_pages=s.base_pages)
    inside = (page >= 0) & (page < pages) & (slot >= 0) & (slot < pages_ref.shape[2])
    for first, place_C, size, row in (
        (0, channel, s.rank, x * np.float32(s.scale)),
        (s.rank, further, s.turned, key[0]),
    ):
        own = (place_C < size) & inside
        # Beside the last page where masked: an interpreted store reads and writes those, too.
        at = pages_ref.at[jnp.where(own, page, pages), 0, jnp.broadcast_to(slot, own.shape), first + place_C]
        store(at, stored(row, pages_ref.dtype), mask=own)


def _read(
    body: _Body, ref: dict[str, Any], names: tuple[str, str], m: jax.Array, channel: jax.Array, end: int
) -> jax.Array:
    """Sums of a row's product in its parts' order, and the bias."""
    (part, bias), mask = names, channel < end
    x = load(ref[part].at[0, m, channel], mask=mask, other=0.0)
    for s in range(1, ref[part].shape[0]):
        x = x + load(ref[part].at[s, m, channel], mask=mask, other=0.0)
    return x if bias not in ref else x + _param(body, ref, bias, channel, mask)


def _normed(body: _Body, ref: dict[str, Any], x: jax.Array, scale: tuple[str, jax.Array, int]) -> jax.Array:
    name, channel, width = scale
    inverse = lax.rsqrt(total(x * x, 0, body.how) / np.float32(width) + np.float32(body.latents.eps))
    return x * inverse * _param(body, ref, name, channel, channel < width)


def _param(body: _Body, ref: dict[str, Any], name: str, channel: jax.Array, mask: jax.Array) -> jax.Array:
    lead = (ref["layer"][0],) if body.stacked else ()
    return load(ref[name].at[(*lead, channel)], mask=mask, other=0.0).astype(jnp.float32)
