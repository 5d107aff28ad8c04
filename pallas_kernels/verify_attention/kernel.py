"""The kernels: softmax over one piece of a row's cache, and the pieces put together in their order."""

from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Implementation, Launch, ds, launch, load, program_id, store, whole
from pallas_kernels.steady import exp, total
from pallas_kernels.verify_attention.reference import first_seen

MASKED = -1e30  # finite, so that what shows a query nothing leaves its running softmax as it is
TOGETHER = 16  # splits that are put together at a time
FILLING = 256  # programs that keep every multiprocessor of a card busy


@dataclass(frozen=True)
class Tiles:
    """Sizes that a row's rounding depends on, so none may depend on how many rows or positions there are.

    Attributes:
      rows: height of a tile of queries; one kv head's queries of a row's positions lie in it, position after position.
      block: cached positions of one product.
      split: cached positions whose softmax is one piece, a multiple of ``block``.
      launch: of the programs that read the cache.
    """

    rows: int = 32
    block: int = 64
    split: int = 256
    launch: Launch = field(default_factory=Launch)


@dataclass(frozen=True)
class Plan:
    """Everything static about one call.

    Attributes:
      rows, count, heads, kv_heads: B, T, H, G.
      key_width, value_width: C and C'; without pages of their own the values are the beginnings of the keys.
      scale: of the scores.
      dtype: of the products' factors.
      capacity: positions of a row.
      page: of them on one page.
      span: most positions that a query sees, None for all; below 0 those from the last multiple of ``-span`` on.
      ring: whether a row's page is addressed by position modulo its size.
      paths: longest path of a tree, 0 for a chain.
      tiles: see ``Tiles``.
      implementation: ``triton`` or ``interpret``.
      base_pages: multiplies the base.
    """

    rows: int
    count: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    scale: float
    dtype: Any
    capacity: int
    page: int
    span: int | None
    ring: bool
    paths: int
    tiles: Tiles
    implementation: Implementation
    base_pages: int = 1

    @property
    def group(self) -> int:
        """Queries per kv head and position."""
        return self.heads // self.kv_heads

    @property
    def value_parts(self) -> tuple[tuple[int, int], ...]:
        """Powers of two that the values are cut into, as first channel and width."""
        return powers_of_two(0, self.value_width)

    @property
    def key_parts(self) -> tuple[tuple[int, int], ...]:
        """The same of the keys; those that are values too are cut alike."""
        if self.key_width < self.value_width:
            return powers_of_two(0, self.key_width)
        return self.value_parts + powers_of_two(self.value_width, self.key_width)

    @property
    def whole_reach(self) -> bool:
        """Whether one program reads all that a tile sees; decided by the window, never by T or the capacity."""
        return self.span is not None and abs(self.span) <= self.tiles.split

    @property
    def splits(self) -> int:
        """Pieces that a tile's reach may be cut into."""
        if self.whole_reach:
            return 1
        most = -(-self.capacity // self.tiles.split)
        if self.span is None:
            return most
        return min(most + 1, (abs(self.span) + self.count - 2) // self.tiles.split + 2)

    @property
    def tiles_of_queries(self) -> int:
        """Tiles of all rows and kv heads."""
        return self.rows * self.kv_heads * -(-self.count * self.group // self.tiles.rows)

    @property
    def programs(self) -> int:
        """Programs that share a tile's splits: no more than fill the card, for most splits of a short row are empty."""
        return min(self.splits, -(-FILLING // self.tiles_of_queries))


def powers_of_two(first: int, end: int) -> tuple[tuple[int, int], ...]:
    """Cuts a range of channels into powers of two, the largest first."""
    parts = []
    while first < end:
        width = 1 << (end - first).bit_length() - 1
        parts.append((first, width))
        first += width
    return tuple(parts)


def attend_kernel(plan: Plan, operands: dict[str, jax.Array]) -> jax.Array:
    """Runs the kernels.

    Args:
      plan: what is static.
      operands: ``q`` [B * T * H, C], ``position`` [B * T], ``k`` [P, G, Z, C]; where they apply also ``v``
        [P, G, Z, C'], ``table`` [B, J], ``row`` [B], ``base`` [1], ``sinks`` [H], ``start`` [B] and ``path``
        [B * T * J].

    Returns:
      float32 [B * T * H, C'].
    """
    tiles, flat, wide = plan.tiles, plan.rows * plan.count * plan.heads, plan.value_width
    names, arrays = tuple(operands), tuple(operands.values())
    result = jax.ShapeDtypeStruct((flat, wide), jnp.float32)
    pieces = [
        jax.ShapeDtypeStruct((plan.splits, flat), jnp.float32),
        jax.ShapeDtypeStruct((plan.splits, flat), jnp.float32),
        jax.ShapeDtypeStruct((plan.splits, flat, wide), jnp.float32),
    ]
    out: Any = launch(
        partial(_read_cache, plan, names),
        *arrays,
        name="verify_attention",
        grid=(plan.tiles_of_queries, plan.programs),
        in_specs=[whole(x.shape) for x in arrays],
        out_specs=whole(result.shape) if plan.whole_reach else [whole(x.shape) for x in pieces],
        out_shape=result if plan.whole_reach else pieces,
        how=tiles.launch,
        implementation=plan.implementation,
    )
    if plan.whole_reach:
        return out
    kept = {name: operands[name] for name in ("position", "sinks", "base") if name in operands}
    arrays = (*kept.values(), *out)
    return launch(
        partial(_put_together, plan, tuple(kept)),
        *arrays,
        name="verify_attention_pieces",
        grid=(flat,),
        in_specs=[whole(x.shape) for x in arrays],
        out_specs=whole(result.shape),
        out_shape=result,
        how=Launch(num_warps=4, num_stages=1),
        implementation=plan.implementation,
    )


@dataclass(frozen=True)
class _Tile:
    """The queries of one program: batch row, kv head, and per query its row in ``q``, position and node."""

    b: jax.Array
    g: jax.Array
    flat_M: jax.Array
    real_M: jax.Array
    head_M: jax.Array
    node_M: jax.Array
    position_M: jax.Array


def _tile(plan: Plan, ref: dict[str, Any]) -> _Tile:
    size, group = plan.tiles.rows, plan.group
    per_head = -(-plan.count * group // size)
    x = program_id(0)
    g, b = x // per_head % plan.kv_heads, x // per_head // plan.kv_heads
    place_M = x % per_head * size + jnp.arange(size, dtype=jnp.int32)
    real_M = place_M < plan.count * group
    node_M = jnp.minimum(place_M // group, plan.count - 1)
    head_M = g * group + place_M % group
    query_M = b * plan.count + node_M
    flat_M = jnp.where(real_M, query_M * plan.heads + head_M, plan.rows * plan.count * plan.heads)
    return _Tile(b, g, flat_M, real_M, head_M, node_M, load(ref["position"].at[query_M]))


def _read_cache(plan: Plan, names: tuple[str, ...], *refs: Any) -> None:
    """One program: one tile's softmax over splits of its reach, each for itself, or over all of a short one."""
    ref, outs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    tile, length = _tile(plan, ref), plan.tiles.split
    low, high = jnp.min(tile.position_M), jnp.max(tile.position_M)
    first = jnp.int32(0) if plan.span is None else jnp.maximum(first_seen(low, plan.span), 0)
    end = high + 1 if plan.ring else jnp.minimum(high + 1, plan.capacity)
    if plan.whole_reach:
        _, total_M, parts = _run(plan, ref, tile, first, end, _begin(plan, tile, ref))
        inverse_M1 = (1 / jnp.maximum(total_M, 1e-30))[:, None]
        _store(plan, tile, outs[0], tuple(part * inverse_M1 for part in parts))
        return
    begin = first // length + program_id(1)

    def attend(turn: jax.Array, carry: jax.Array) -> jax.Array:
        split = begin + turn * plan.programs
        piece_first = jnp.maximum(split * length, first)
        piece_end = jnp.minimum((split + 1) * length, end)
        top_M, total_M, parts = _run(plan, ref, tile, piece_first, piece_end, _begin(plan, tile, {}))
        place = split % plan.splits
        store(outs[0].at[place, tile.flat_M], top_M, mask=tile.real_M)
        store(outs[1].at[place, tile.flat_M], total_M, mask=tile.real_M)
        _store(plan, tile, outs[2], parts, (place,))
        return carry

    turns = ((end + length - 1) // length - begin + plan.programs - 1) // plan.programs
    lax.fori_loop(0, jnp.maximum(turns, 0), attend, jnp.int32(0))


def _begin(plan: Plan, tile: _Tile, ref: dict[str, Any]) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """A running softmax that has seen nothing but a sink."""
    size = plan.tiles.rows
    outs = tuple(jnp.zeros((size, width), jnp.float32) for _, width in plan.value_parts)
    if "sinks" not in ref:
        return jnp.full(size, MASKED, jnp.float32), jnp.zeros(size, jnp.float32), outs
    return load(_sinks(ref, tile.head_M)).astype(jnp.float32), jnp.ones(size, jnp.float32), outs


def _sinks(ref: dict[str, Any], head: jax.Array) -> Any:
    sinks = ref["sinks"]
    return sinks.at[head] if len(sinks.shape) == 1 else sinks.at[ref["base"][0], head]


def _store(plan: Plan, tile: _Tile, ref: Any, parts: tuple[jax.Array, ...], index: tuple[jax.Array, ...] = ()) -> None:
    for (first, width), part in zip(plan.value_parts, parts, strict=True):
        store(ref.at[(*index, tile.flat_M[:, None], _channels(first, width))], part, mask=tile.real_M[:, None])


def _run(plan: Plan, ref: dict[str, Any], tile: _Tile, first: jax.Array, end: jax.Array, carry: Any) -> Any:
    """Attends to positions from ``first`` to ``end``; a tree's own to each node's ancestors, at their depths."""
    size = plan.tiles.block
    q_parts = [
        load(ref["q"].at[tile.flat_M[:, None], _channels(c, w)], mask=tile.real_M[:, None], other=0)
        for c, w in plan.key_parts
    ]
    q_parts = [(q * plan.scale).astype(plan.dtype) for q in q_parts]

    def shared(index: jax.Array, carry: Any) -> Any:
        page, slot = _page(plan, ref, tile.b, index * size)
        k_parts = [_values(ref["k"].at[page, tile.g, ds(slot, size), ds(c, w)]) for c, w in plan.key_parts]
        v_parts = None
        if "v" in ref:
            v_parts = [_values(ref["v"].at[page, tile.g, ds(slot, size), ds(c, w)]) for c, w in plan.value_parts]
        position_Z = index * size + jnp.arange(size, dtype=jnp.int32)
        return _visit(plan, q_parts, k_parts, v_parts, _seen(plan, tile, position_Z), carry)

    low_block, end_block = first // size, (end + size - 1) // size
    if not plan.paths:
        return lax.fori_loop(low_block, end_block, shared, carry)
    start = ref["start"][tile.b]
    tail = jnp.clip(start // size, low_block, end_block)
    carry = lax.fori_loop(low_block, tail, shared, carry)
    low_node, high_node = jnp.min(tile.node_M), jnp.max(tile.node_M)

    def own(turn: jax.Array, carry: Any) -> Any:
        """One block as one node sees it; the other nodes' sums stay as they are."""
        node = low_node + turn % (high_node - low_node + 1)
        index = tail + turn // (high_node - low_node + 1)
        position_Z = index * size + jnp.arange(size, dtype=jnp.int32)
        depth_Z = position_Z - start
        on_path_Z = (depth_Z >= 0) & (depth_Z < plan.paths)
        first_step = (tile.b * plan.count + node) * plan.paths
        step_Z = load(ref["path"].at[first_step + jnp.clip(depth_Z, 0, plan.paths - 1)])
        page_Z1, slot_Z1 = _page(plan, ref, tile.b, jnp.where(on_path_Z, start + step_Z, position_Z)[:, None])
        k_parts = [_values(ref["k"].at[page_Z1, tile.g, slot_Z1, _channels(c, w)]) for c, w in plan.key_parts]
        v_parts = None
        if "v" in ref:
            v_parts = [_values(ref["v"].at[page_Z1, tile.g, slot_Z1, _channels(c, w)]) for c, w in plan.value_parts]
        seen_MZ = _seen(plan, tile, position_Z) & (tile.node_M == node)[:, None]
        return _visit(plan, q_parts, k_parts, v_parts, seen_MZ, carry)

    return lax.fori_loop(0, (end_block - tail) * (high_node - low_node + 1), own, carry)


def _page(plan: Plan, ref: dict[str, Any], b: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Page of positions, and the place on it."""
    position = position if plan.ring else jnp.clip(position, 0, plan.capacity - 1)
    slot = position % plan.page
    page = ref["row"][b] if "row" in ref else b
    if "table" in ref:
        page = load(ref["table"].at[b, position // plan.page])
    if "base" in ref:
        page = page + ref["base"][0] * plan.base_pages
    last = ref["k"].shape[0] - 1
    return jnp.broadcast_to(jnp.clip(page, 0, last), slot.shape), slot


def _channels(first: int, width: int) -> jax.Array:
    return first + jnp.arange(width, dtype=jnp.int32)[None]


def _values(ref: Any) -> jax.Array:
    """Cached entries; bfloat16 may be kept as its bits."""
    x = load(ref)
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _seen(plan: Plan, tile: _Tile, position_Z: jax.Array) -> jax.Array:
    seen_MZ = position_Z[None] <= tile.position_M[:, None]
    if plan.span is None:
        return seen_MZ
    return seen_MZ & (position_Z[None] >= first_seen(tile.position_M, plan.span)[:, None])


def _visit(plan: Plan, q_parts: Any, k_parts: Any, v_parts: Any, seen_MZ: jax.Array, carry: Any) -> Any:
    """One block of the running softmax (Milakov 2018)."""
    (top_M, total_M, out_parts), how = carry, plan.implementation
    k_parts = [k.astype(plan.dtype) for k in k_parts]
    score_MZ = reduce(add, (_dot(q, k.T) for q, k in zip(q_parts, k_parts, strict=True)))
    new_top_M = jnp.maximum(top_M, jnp.max(jnp.where(seen_MZ, score_MZ, MASKED), axis=1))
    prob_MZ = jnp.where(seen_MZ, exp(score_MZ - new_top_M[:, None], how), 0.0)
    keep_M = exp(top_M - new_top_M, how)
    weight_MZ = prob_MZ.astype(plan.dtype)
    values = k_parts[: len(out_parts)] if v_parts is None else [v.astype(plan.dtype) for v in v_parts]
    out_parts = tuple(out * keep_M[:, None] + _dot(weight_MZ, v) for out, v in zip(out_parts, values, strict=True))
    return new_top_M, total_M * keep_M + total(prob_MZ, 1, how), out_parts


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _put_together(plan: Plan, names: tuple[str, ...], *refs: Any) -> None:
    """One program: one query's splits, so many at a time, in their order."""
    ref, (tops, totals, parts, result) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    flat, length, how = program_id(0), plan.tiles.split, plan.implementation
    position = ref["position"][flat // plan.heads]
    first = jnp.int32(0) if plan.span is None else jnp.maximum(first_seen(position, plan.span), 0) // length
    end = (position if plan.ring else jnp.minimum(position, plan.capacity - 1)) // length + 1
    chunk_S = jnp.arange(TOGETHER, dtype=jnp.int32)

    def merge(chunk: jax.Array, carry: Any) -> Any:
        top, weight, outs = carry
        split_S = chunk * TOGETHER + chunk_S
        is_there_S = (split_S >= first) & (split_S < end)
        place_S = split_S % plan.splits
        top_S = load(tops.at[place_S, flat], mask=is_there_S, other=MASKED)
        total_S = load(totals.at[place_S, flat], mask=is_there_S, other=0.0)
        new_top = jnp.maximum(top, jnp.max(top_S))
        weight_S = jnp.where(is_there_S, exp(top_S - new_top, how), 0.0)
        keep = exp(top - new_top, how)
        new_outs = []
        for (c, w), out in zip(plan.value_parts, outs, strict=True):
            part_SC = load(parts.at[place_S[:, None], flat, _channels(c, w)], mask=is_there_S[:, None], other=0.0)
            new_outs.append(out * keep + total(part_SC * weight_S[:, None], 0, how))
        return new_top, weight * keep + total(total_S * weight_S, 0, how), tuple(new_outs)

    outs = tuple(jnp.zeros(w, jnp.float32) for _, w in plan.value_parts)
    carry = (jnp.float32(MASKED), jnp.float32(0), outs)
    if "sinks" in ref:
        carry = (load(_sinks(ref, flat % plan.heads)).astype(jnp.float32), jnp.float32(1), outs)
    _, weight, outs = lax.fori_loop(first // TOGETHER, (end + TOGETHER - 1) // TOGETHER, merge, carry)
    for (c, w), out in zip(plan.value_parts, outs, strict=True):
        store(result.at[flat, ds(c, w)], out / jnp.maximum(weight, 1e-30))
