"""The kernels: softmax over one piece of a row's cache, and the pieces put together in their order."""

from collections.abc import Callable
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
from pallas_kernels.where import find_page, on_path, values_of

MASKED = -1e30  # finite, so that what shows a query nothing leaves its running softmax as it is
TOGETHER = 16  # splits that are put together at a time
FILLING = 256  # programs that keep every multiprocessor of a card busy
Body = Callable[..., None]


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
    return launch_pieces(plan, operands, "verify_attention", (_read_cache, _put_together), "position")


def launch_pieces(
    plan: Plan, operands: dict[str, jax.Array], name: str, bodies: tuple[Body, Body], reach: str
) -> jax.Array:
    """Launches a kernel that computes pieces, and the one that puts them together where there are several.

    Args:
      plan: what is static.
      operands: of the first kernel.
      name: of the kernels.
      bodies: theirs; they take the plan, the operands' names, and references to operands and results.
      reach: name of the operand that says how many pieces a query has.
    """
    flat, wide = plan.rows * plan.count * plan.heads, plan.value_width
    names, arrays = tuple(operands), tuple(operands.values())
    result, each = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((flat, wide), (plan.splits, flat)))
    pieces = [each, each, jax.ShapeDtypeStruct((*each.shape, wide), jnp.float32)]
    out: Any = launch(
        partial(bodies[0], plan, names),
        *arrays,
        name=name,
        grid=(plan.tiles_of_queries, plan.programs),
        in_specs=[whole(x.shape) for x in arrays],
        out_specs=whole(result.shape) if plan.whole_reach else [whole(x.shape) for x in pieces],
        out_shape=result if plan.whole_reach else pieces,
        how=plan.tiles.launch,
        implementation=plan.implementation,
    )
    if plan.whole_reach:
        return out
    kept = {name: operands[name] for name in (reach, "sinks", "base") if name in operands}
    arrays = (*kept.values(), *out)
    return launch(
        partial(bodies[1], plan, tuple(kept)),
        *arrays,
        name=f"{name}_pieces",
        grid=(flat,),
        in_specs=[whole(x.shape) for x in arrays],
        out_specs=whole(result.shape),
        out_shape=result,
        how=Launch(num_warps=4, num_stages=1),
        implementation=plan.implementation,
    )


@dataclass(frozen=True)
class Tile:
    """The queries of one program: batch row, kv head, and per query its row in ``q``, position and node."""

    b: jax.Array
    g: jax.Array
    flat_M: jax.Array
    real_M: jax.Array
    head_M: jax.Array
    node_M: jax.Array
    position_M: jax.Array


def _tile(plan: Plan, ref: dict[str, Any]) -> Tile:
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
    return Tile(b, g, flat_M, real_M, head_M, node_M, load(ref["position"].at[query_M]))


def _read_cache(plan: Plan, names: tuple[str, ...], *refs: Any) -> None:
    """One program: one tile's softmax over splits of its reach, each for itself, or over all of a short one."""
    ref, outs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    tile, length = _tile(plan, ref), plan.tiles.split
    low, high = jnp.min(tile.position_M), jnp.max(tile.position_M)
    first = jnp.int32(0) if plan.span is None else jnp.maximum(first_seen(low, plan.span), 0)
    end = high + 1 if plan.ring else jnp.minimum(high + 1, plan.capacity)
    if plan.whole_reach:
        _, total_M, parts = _run(plan, ref, tile, first, end, begin_softmax(plan, tile, ref))
        inverse_M1 = (1 / jnp.maximum(total_M, 1e-30))[:, None]
        store_parts(plan, tile, outs[0], tuple(part * inverse_M1 for part in parts))
        return
    begin = first // length + program_id(1)

    def attend(turn: jax.Array, carry: jax.Array) -> jax.Array:
        split = begin + turn * plan.programs
        piece_first = jnp.maximum(split * length, first)
        piece_end = jnp.minimum((split + 1) * length, end)
        top_M, total_M, parts = _run(plan, ref, tile, piece_first, piece_end, begin_softmax(plan, tile, {}))
        place = split % plan.splits
        store(outs[0].at[place, tile.flat_M], top_M, mask=tile.real_M)
        store(outs[1].at[place, tile.flat_M], total_M, mask=tile.real_M)
        store_parts(plan, tile, outs[2], parts, (place,))
        return carry

    turns = ((end + length - 1) // length - begin + plan.programs - 1) // plan.programs
    lax.fori_loop(0, jnp.maximum(turns, 0), attend, jnp.int32(0))


def begin_softmax(plan: Plan, tile: Tile, ref: dict[str, Any]) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """A running softmax that has seen nothing but a sink."""
    size = plan.tiles.rows
    outs = tuple(jnp.zeros((size, width), jnp.float32) for _, width in plan.value_parts)
    if "sinks" not in ref:
        return jnp.full(size, MASKED, jnp.float32), jnp.zeros(size, jnp.float32), outs
    return load(_sinks(ref, tile.head_M)).astype(jnp.float32), jnp.ones(size, jnp.float32), outs


def _sinks(ref: dict[str, Any], head: jax.Array) -> Any:
    sinks = ref["sinks"]
    return sinks.at[head] if len(sinks.shape) == 1 else sinks.at[ref["base"][0], head]


def store_parts(
    plan: Plan, tile: Tile, ref: Any, parts: tuple[jax.Array, ...], index: tuple[jax.Array, ...] = ()
) -> None:
    """Stores a tile's results, or those of one piece, whose number is ``index``."""
    for (first, width), part in zip(plan.value_parts, parts, strict=True):
        store(ref.at[(*index, tile.flat_M[:, None], channels(first, width))], part, mask=tile.real_M[:, None])


def load_queries(plan: Plan, ref: dict[str, Any], tile: Tile) -> list[jax.Array]:
    """A tile's queries, scaled, by the parts of a key."""
    mask_M1, flat_M1 = tile.real_M[:, None], tile.flat_M[:, None]
    q_parts = [load(ref["q"].at[flat_M1, channels(c, w)], mask=mask_M1, other=0) for c, w in plan.key_parts]
    return [(q * plan.scale).astype(plan.dtype) for q in q_parts]


def _run(plan: Plan, ref: dict[str, Any], tile: Tile, first: jax.Array, end: jax.Array, carry: Any) -> Any:
    """Attends to positions from ``first`` to ``end``; a tree's own to each node's ancestors, at their depths."""
    size, q_parts = plan.tiles.block, load_queries(plan, ref, tile)

    def shared(index: jax.Array, carry: Any) -> Any:
        page, slot = find_page(plan, ref, tile.b, index * size)
        k_parts = [values_of(ref["k"].at[page, tile.g, ds(slot, size), ds(c, w)]) for c, w in plan.key_parts]
        v_parts = None
        if "v" in ref:
            v_parts = [values_of(ref["v"].at[page, tile.g, ds(slot, size), ds(c, w)]) for c, w in plan.value_parts]
        position_Z = index * size + jnp.arange(size, dtype=jnp.int32)
        return visit(plan, q_parts, k_parts, v_parts, _seen(plan, tile, position_Z), carry)

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
        page_Z1, slot_Z1 = find_page(plan, ref, tile.b, on_path(plan, ref, tile.b, node, position_Z)[:, None])
        k_parts = [values_of(ref["k"].at[page_Z1, tile.g, slot_Z1, channels(c, w)]) for c, w in plan.key_parts]
        v_parts = None
        if "v" in ref:
            v_parts = [values_of(ref["v"].at[page_Z1, tile.g, slot_Z1, channels(c, w)]) for c, w in plan.value_parts]
        seen_MZ = _seen(plan, tile, position_Z) & (tile.node_M == node)[:, None]
        return visit(plan, q_parts, k_parts, v_parts, seen_MZ, carry)

    return lax.fori_loop(0, (end_block - tail) * (high_node - low_node + 1), own, carry)


def channels(first: int, width: int) -> jax.Array:
    """Numbers of the channels of a part, as a row."""
    return first + jnp.arange(width, dtype=jnp.int32)[None]


def _seen(plan: Plan, tile: Tile, position_Z: jax.Array) -> jax.Array:
    seen_MZ = position_Z[None] <= tile.position_M[:, None]
    if plan.span is None:
        return seen_MZ
    return seen_MZ & (position_Z[None] >= first_seen(tile.position_M, plan.span)[:, None])


def visit(plan: Plan, q_parts: Any, k_parts: Any, v_parts: Any, seen_MZ: jax.Array, carry: Any) -> Any:
    """One block of the running softmax (Milakov 2018)."""
    (top_M, total_M, out_parts), how = carry, plan.implementation
    k_parts = [k.astype(plan.dtype) for k in k_parts]
    score_MZ = reduce(add, (dot(q, k.T) for q, k in zip(q_parts, k_parts, strict=True)))
    new_top_M = jnp.maximum(top_M, jnp.max(jnp.where(seen_MZ, score_MZ, MASKED), axis=1))
    prob_MZ = jnp.where(seen_MZ, exp(score_MZ - new_top_M[:, None], how), 0.0)
    keep_M = exp(top_M - new_top_M, how)
    weight_MZ = prob_MZ.astype(plan.dtype)
    values = k_parts[: len(out_parts)] if v_parts is None else [v.astype(plan.dtype) for v in v_parts]
    out_parts = tuple(out * keep_M[:, None] + dot(weight_MZ, v) for out, v in zip(out_parts, values, strict=True))
    return new_top_M, total_M * keep_M + total(prob_MZ, 1, how), out_parts


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product whose sums are float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _put_together(plan: Plan, names: tuple[str, ...], *refs: Any) -> None:
    """One program: one query's splits, so many at a time, in their order."""
    ref, flat, length = dict(zip(names, refs, strict=False)), program_id(0), plan.tiles.split
    position = ref["position"][flat // plan.heads]
    first = jnp.int32(0) if plan.span is None else jnp.maximum(first_seen(position, plan.span), 0) // length
    end = (position if plan.ring else jnp.minimum(position, plan.capacity - 1)) // length + 1
    merge_pieces(plan, ref, flat, (first, end), refs[len(names) :])


def merge_pieces(plan: Plan, ref: dict[str, Any], flat: jax.Array, reach: Any, refs: tuple[Any, ...]) -> None:
    """One query's result, of its pieces from the first of ``reach`` up to the second."""
    (first, end), (tops, totals, parts, result), how = reach, refs, plan.implementation
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
            part_SC = load(parts.at[place_S[:, None], flat, channels(c, w)], mask=is_there_S[:, None], other=0.0)
            new_outs.append(out * keep + total(part_SC * weight_S[:, None], 0, how))
        return new_top, weight * keep + total(total_S * weight_S, 0, how), tuple(new_outs)

    outs = tuple(jnp.zeros(w, jnp.float32) for _, w in plan.value_parts)
    carry = (jnp.float32(MASKED), jnp.float32(0), outs)
    if "sinks" in ref:
        carry = (load(_sinks(ref, flat % plan.heads)).astype(jnp.float32), jnp.float32(1), outs)
    _, weight, outs = lax.fori_loop(first // TOGETHER, (end + TOGETHER - 1) // TOGETHER, merge, carry)
    for (c, w), out in zip(plan.value_parts, outs, strict=True):
        store(result.at[flat, ds(c, w)], out / jnp.maximum(weight, 1e-30))
