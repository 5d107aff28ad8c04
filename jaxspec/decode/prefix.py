"""Takes over what the target and the drafter keep of a prefix: from a row into a store, and into other rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec
from jaxspec.cache.prefix_blocks import BlockPlace, LayerBlocks, Streams, give_block, init_blocks, take_block, why_not
from jaxspec.decode.state import DecodeState, Target
from jaxspec.models.caches import layout
from jaxspec.protocol import Drafter
from jaxspec.pytree import replace
from jaxspec.shapes import Array

Store = tuple[LayerBlocks, ...]
LEAST = 8  # positions of a block


@dataclass(frozen=True)
class PrefixPlan:
    """What of a state is a text's prefix, and in blocks of how many positions it is copied.

    Attributes:
      size: positions of a block.
      drafter: knows its caches; shapes alone.
      target: streams of each of the target's caches, and how many layers share it.
      rows_sharded: as of ``Window``.
    """

    size: int
    drafter: Drafter
    target: Sequence[tuple[dict[str, StreamSpec], int]]
    rows_sharded: bool

    @property
    def lasts(self) -> bool:
        """Says whether a row's prefix can be read as long as its text runs."""
        return all(spec.prefix.lasts for streams, _ in self.layout for spec in streams.values())

    @property
    def refusal(self) -> str:
        """Says why a prefix cannot be taken over; empty where it can."""
        if self.size < LEAST:
            return f"prefill_buckets share no factor of at least {LEAST} with each other and the page size"
        return self.drafter.prefix_refusal or why_not((streams for streams, _ in self.layout), self.size)

    @property
    def layout(self) -> list[tuple[Streams, int]]:
        """Streams and layers of each cache, the drafter's last."""
        return [*self.target, *self.drafter.cache_layout]

    def caches_of(self, state: DecodeState) -> tuple[LayerCache, ...]:
        """Returns a state's caches, the drafter's last."""
        return (*state.layers, *self.drafter.caches_of(state.draft))

    def init_store(self, state: DecodeState, blocks: int) -> Store:
        """Allocates a store of so many blocks."""
        pairs = zip(self.caches_of(state), self.layout, strict=True)
        return tuple(init_blocks(cache, *kind, blocks=blocks, size=self.size) for cache, kind in pairs)

    def places(self, row: Array, table_J: Array | None, number: Array) -> list[BlockPlace]:
        """Returns where a row's block lies in each cache; only the target's have pages of a pool."""
        start = number * jnp.int32(self.size)
        own = BlockPlace(row, start, None, self.size, self.rows_sharded)
        return [replace(own, table_J=table_J)] * len(self.target) + [own] * len(self.drafter.cache_layout)


def plan_prefix(target: Target, drafter: Drafter, buckets: Sequence[int]) -> PrefixPlan:
    """Returns how prefixes are taken over where prompts are read in chunks of these sizes."""
    net = target.net
    # Chunks then end at the ends of blocks, and a block lies in one page and comes round no ring's end.
    size = math.gcd(*buckets, target.block)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), drafter)
    return PrefixPlan(size, shapes, layout(net.arch, net.policy), net.policy.compute.splits_rows)


def save_blocks(
    store: Store, state: DecodeState, row: Array, table_J: Array | None, first: Array, id_J: Array, count: Array,
    *, plan: PrefixPlan,
) -> Store:  # fmt: skip
    """Copies blocks of a row into the store.

    Args:
      store: donated.
      state: of all rows.
      row: int32 scalar.
      table_J: page ids of the row, None without a page pool.
      first: number of the first block in the text.
      id_J: where they go in the store.
      count: how many there are.
      plan: static.
    """
    caches = plan.caches_of(state)

    def one(i: Array, store: Store) -> Store:
        parts = zip(store, caches, plan.layout, plan.places(row, table_J, first + i), strict=True)
        return tuple(take_block(blocks, cache, *kind, place, id_J[i]) for blocks, cache, kind, place in parts)

    return lax.fori_loop(0, count, one, store)


def load_blocks(
    store: Store, state: DecodeState, row: Array, table_J: Array | None, first: Array, id_J: Array, count: Array,
    *, plan: PrefixPlan,
) -> DecodeState:  # fmt: skip
    """Copies blocks from the store into a row that is being read; the state is donated, else as ``save_blocks``."""

    def one(i: Array, caches: tuple[LayerCache, ...]) -> tuple[LayerCache, ...]:
        parts = zip(caches, store, plan.layout, plan.places(row, table_J, first + i), strict=True)
        return tuple(give_block(cache, blocks, *kind, place, id_J[i]) for cache, blocks, kind, place in parts)

    caches = lax.fori_loop(0, count, one, plan.caches_of(state))
    layers, own = caches[: len(plan.target)], caches[len(plan.target) :]
    # Rows that decode meanwhile write ahead in this one from here on.
    length_B = state.length_B.at[row].set((first + count) * plan.size)
    return replace(state, layers=layers, draft=plan.drafter.with_caches(state.draft, own), length_B=length_B)
