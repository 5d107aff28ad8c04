"""The kernels: softmax over one piece of a query's entries, gathered by their places, and the pieces put together."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import load, program_id, store
from pallas_kernels.verify_attention.kernel import (
    Plan,
    Tile,
    begin_softmax,
    channels,
    launch_pieces,
    load_queries,
    merge_pieces,
    store_parts,
    visit,
)
from pallas_kernels.verify_attention.reference import first_seen
from pallas_kernels.where import find_page, on_path, values_of


@dataclass(frozen=True)
class ChosenPlan(Plan):
    """Everything static about one call; a tile holds heads of one query, which has entries of its own.

    Attributes:
      most: entries that a query attends to at most.
      room: positions of a row's ring, 0 without one.
    """

    most: int = 0
    room: int = 0

    @property
    def whole_reach(self) -> bool:
        """Never: entries have pieces of their own."""
        return False

    @property
    def near(self) -> int:
        """Pieces before those of the entries: the latest positions, if they are seen, are the first."""
        return int(self.span is not None)

    @property
    def splits(self) -> int:
        """Pieces that a query's softmax may be cut into."""
        return self.near + -(-self.most // self.tiles.split)

    @property
    def tiles_per_query(self) -> int:
        """Tiles that the heads of a query are cut into."""
        return -(-self.heads // self.tiles.rows)

    @property
    def tiles_of_queries(self) -> int:
        """Tiles of all rows and queries."""
        return self.rows * self.count * self.tiles_per_query


def attend_kernel(plan: ChosenPlan, operands: dict[str, jax.Array]) -> jax.Array:
    """Runs the kernels.

    Args:
      plan: what is static.
      operands: ``q`` [B * T * H, C], ``count`` [B * T], ``k`` [P, 1, Z, C]; where they apply also ``place``
        [B * T * K], ``recent`` [P, 1, R, C] with ``position`` [B * T], ``table`` [B, J], ``row`` [B], ``base`` [1],
        ``sinks`` [H], ``start`` [B] and ``path`` [B * T * J].

    Returns:
      float32 [B * T * H, C'].
    """
    return launch_pieces(plan, operands, "chosen_attention", (_read_entries, _put_together), "count")


def _read_entries(plan: ChosenPlan, names: tuple[str, ...], *refs: Any) -> None:
    """One program: some pieces of one tile's softmax, each for itself."""
    ref, outs, length = dict(zip(names, refs, strict=False)), refs[len(names) :], plan.tiles.split
    query, program = program_id(0) // plan.tiles_per_query, program_id(1)
    entries = ref["count"][query]
    tile = _tile(plan, query, entries)
    q_parts = load_queries(plan, ref, tile)

    def attend(turn: jax.Array, carry: jax.Array) -> jax.Array:
        piece = program + turn * plan.programs
        softmax = begin_softmax(plan, tile, {})
        if plan.near:
            softmax = _see_recent(plan, ref, tile, q_parts, piece == 0, softmax)
        first = (piece - plan.near) * length
        reach = jnp.maximum(first, 0), jnp.clip(entries, 0, first + length)
        top_M, total_M, parts = _see_entries(plan, ref, tile, q_parts, reach, softmax)
        store(outs[0].at[piece, tile.flat_M], top_M, mask=tile.real_M)
        store(outs[1].at[piece, tile.flat_M], total_M, mask=tile.real_M)
        store_parts(plan, tile, outs[2], parts, (piece,))
        return carry

    turns = (plan.near + (entries + length - 1) // length - program + plan.programs - 1) // plan.programs
    lax.fori_loop(0, jnp.maximum(turns, 0), attend, jnp.int32(0))


def _tile(plan: ChosenPlan, query: jax.Array, entries: jax.Array) -> Tile:
    """Some heads of one query, with the rank of its last entry as their position."""
    head_M = program_id(0) % plan.tiles_per_query * plan.tiles.rows + jnp.arange(plan.tiles.rows, dtype=jnp.int32)
    real_M = head_M < plan.heads
    flat_M = jnp.where(real_M, query * plan.heads + head_M, plan.rows * plan.count * plan.heads)
    node = query % plan.count  # one number, for all heads of the tile
    return Tile(query // plan.count, jnp.int32(0), flat_M, real_M, head_M, node, jnp.zeros_like(head_M) + entries - 1)


def _see_recent(
    plan: ChosenPlan, ref: dict[str, Any], tile: Tile, q_parts: Any, applies: jax.Array, softmax: Any
) -> Any:
    """Attends to a row's latest positions, in blocks from multiples of their size on."""
    assert plan.span is not None, "asked of layers with a window"
    ring, size = replace(plan, ring=True, page=plan.room), plan.tiles.block
    pages = {name: ref[name] for name in ("row", "base") if name in ref} | {"k": ref["recent"]}
    position = ref["position"][tile.b * plan.count + tile.node_M]
    first = jnp.maximum(first_seen(position, plan.span), 0)

    def see(index: jax.Array, softmax: Any) -> Any:
        position_Z = index * size + jnp.arange(size, dtype=jnp.int32)
        page_Z1, slot_Z1 = find_page(ring, pages, tile.b, position_Z[:, None])
        k_parts = [values_of(ref["recent"].at[page_Z1, tile.g, slot_Z1, channels(c, w)]) for c, w in plan.key_parts]
        seen_Z = (position_Z >= first) & (position_Z <= position)
        return visit(plan, q_parts, k_parts, None, seen_Z[None] & tile.real_M[:, None], softmax)

    return lax.fori_loop(first // size, jnp.where(applies, position // size + 1, 0), see, softmax)


def _see_entries(plan: ChosenPlan, ref: dict[str, Any], tile: Tile, q_parts: Any, reach: Any, softmax: Any) -> Any:
    """Attends to entries by their rank, from the first of ``reach`` up to the second."""
    (first, end), size, query = reach, plan.tiles.block, tile.b * plan.count + tile.node_M

    def see(index: jax.Array, softmax: Any) -> Any:
        rank_Z = index * size + jnp.arange(size, dtype=jnp.int32)
        place_Z = rank_Z
        if "place" in ref:
            place_Z = load(ref["place"].at[query * plan.most + jnp.minimum(rank_Z, plan.most - 1)])
        at_Z = on_path(plan, ref, tile.b, tile.node_M, place_Z)
        page_Z1, slot_Z1 = find_page(plan, ref, tile.b, at_Z[:, None])
        k_parts = [values_of(ref["k"].at[page_Z1, tile.g, slot_Z1, channels(c, w)]) for c, w in plan.key_parts]
        return visit(plan, q_parts, k_parts, None, rank_Z[None] <= tile.position_M[:, None], softmax)

    return lax.fori_loop(first // size, (end + size - 1) // size, see, softmax)


def _put_together(plan: ChosenPlan, names: tuple[str, ...], *refs: Any) -> None:
    """One program: one query's pieces, so many at a time, in their order."""
    ref, flat, length = dict(zip(names, refs, strict=False)), program_id(0), plan.tiles.split
    entries = ref["count"][flat // plan.heads]
    end = plan.near + (entries + length - 1) // length
    merge_pieces(plan, ref, flat, (jnp.int32(0), end), refs[len(names) :])
