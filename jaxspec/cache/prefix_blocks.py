"""Blocks of the first positions of texts: copied from rows into a store, and from there into other rows."""

from collections.abc import Iterable, Mapping

import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec, from_stored, read_stored_block, write
from jaxspec.cache.window import Window
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array

Streams = Mapping[str, StreamSpec]
LayerBlocks = dict[str, Array]


@pytree
class BlockPlace:
    """Where a block lies in a row.

    Attributes:
      row: int32 scalar.
      start: its first position, a multiple of its size.
      table_J: page ids of the row, None where it has pages of its own.
      size: positions of a block.
      rows_sharded: as of ``Window``.
    """

    row: Array
    start: Array
    table_J: Array | None
    size: int = static()
    rows_sharded: bool = static(default=False)


def why_not(streams: Iterable[Streams], size: int) -> str:
    """Returns why blocks of so many positions cannot hold what streams keep of a prefix; empty if they can."""
    for name, spec in ((name, spec) for layer in streams for name, spec in layer.items()):
        if spec.prefix.refusal:
            return f"{name}: {spec.prefix.refusal}"
        if size % spec.stride and spec.stride % size:
            return f"{name}: entries of {spec.stride} positions do not fit into blocks of {size}"
    return ""


def init_blocks(cache: LayerCache, streams: Streams, layers: int, *, blocks: int, size: int) -> LayerBlocks:
    """Allocates room for so many blocks of a cache, which several layers may share."""
    return {
        _key(name): jnp.zeros((blocks, layers, spec.heads, _entries(spec, size), spec.width), cache[name].dtype)
        for name, spec in streams.items()
    }


def take_block(
    blocks: LayerBlocks, cache: LayerCache, streams: Streams, layers: int, place: BlockPlace, number: Array
) -> LayerBlocks:
    """Copies a row's block into the store, as block ``number`` of it."""
    taken = {}
    for name, spec in streams.items():
        window, first = _window(cache[name], spec, layers, place)
        block_YGZC = read_stored_block(cache[name], spec, window, first, (layers, _entries(spec, place.size)))
        zero = jnp.int32(0)
        taken[_key(name)] = lax.dynamic_update_slice(
            blocks[_key(name)], block_YGZC[None], (number, zero, zero, zero, zero)
        )
    return taken


def give_block(
    cache: LayerCache, blocks: LayerBlocks, streams: Streams, layers: int, place: BlockPlace, number: Array
) -> LayerCache:
    """Copies block ``number`` of the store into a row."""
    given = {}
    for name, spec in streams.items():
        window, first = _window(cache[name], spec, layers, place)
        block_YGZC = lax.dynamic_index_in_dim(blocks[_key(name)], number, axis=0, keepdims=False)
        first_Y = jnp.broadcast_to(first, layers)
        given[name] = write(cache[name], spec, window, from_stored(block_YGZC).swapaxes(1, 2), first_Y)
    return given


def _key(name: str) -> str:
    """Returns a stream's name in a store, with the letters of its axes: blocks, layers, then as of a page."""
    return f"{name}_NYGZC"


def _entries(spec: StreamSpec, size: int) -> int:
    """Returns how many entries a block of so many positions has a part in."""
    return max(size // spec.stride, 1)


def _window(pages_PGZC: Array, spec: StreamSpec, layers: int, place: BlockPlace) -> tuple[Window, Array]:
    """Returns a window in which every layer is a row, and the first entry of the block in it."""
    pages_Y = jnp.arange(layers, dtype=jnp.int32) * (pages_PGZC.shape[0] // layers)
    first, start_Y = place.start // spec.stride, jnp.zeros(layers, jnp.int32)
    if spec.pooled and place.table_J is not None:
        size = pages_PGZC.shape[2]  # blocks divide pages, so that each lies in one
        page_Y1 = (jnp.take(place.table_J, first // size) + pages_Y)[:, None]
        return Window(start_Y, page_Y1, rows_sharded=place.rows_sharded), first % size
    return Window(start_Y, row_B=place.row + pages_Y, rows_sharded=place.rows_sharded), first
