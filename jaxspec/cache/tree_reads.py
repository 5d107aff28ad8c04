"""How nodes of a tree read their own ancestors from a cache, and how the accepted path is made consecutive."""

from collections.abc import Mapping

import jax.numpy as jnp

from jaxspec.cache.addressing import (
    LayerCache,
    StreamSpec,
    entry_block,
    from_stored,
    read,
    read_stored,
    read_stored_block,
    write,
)
from jaxspec.cache.window import Window
from jaxspec.shapes import Array


def read_block(pages_PGZC: Array, spec: StreamSpec, window: Window, index: Array, rows: int) -> Array:
    """Reads entries ``index * block`` onwards of every reader, [B, G, block, C], block being ``entry_block``.

    The readers of a tree are its nodes, [B * T, G, block, C]: each finds its own ancestors at the positions of their
    depths, wherever they stand in the tree.
    """
    size = entry_block(spec, window.block)
    block_BGZC = read_stored_block(pages_PGZC, spec, window, index * size, (rows, size))
    if window.path_BTJ is None:
        return from_stored(block_BGZC)
    _, count, depths = window.path_BTJ.shape
    # Provisional nodes lie in the order of the tree, not of their depths: read each node's path, and lay it over the
    # positions of the block that its depths fall on.
    node_BTJ = jnp.broadcast_to(window.start_B[:, None, None] + window.path_BTJ, (rows, count, depths))
    own_BXGC = read_stored(pages_PGZC, spec, window, node_BTJ.reshape(rows, -1))
    own_BTJGC = own_BXGC.reshape(rows, count, depths, *own_BXGC.shape[2:])
    depth_BZ = index * size + jnp.arange(size, dtype=jnp.int32) - window.start_B[:, None]
    inside = jnp.clip(depth_BZ, 0, depths - 1)[:, None, :, None, None]
    own_BTZGC = jnp.take_along_axis(own_BTJGC, inside, axis=2)
    is_own = ((depth_BZ >= 0) & (depth_BZ < depths))[:, None, None, :, None]
    block_BTGZC = jnp.where(is_own, own_BTZGC.swapaxes(2, 3), block_BGZC[:, None])
    return from_stored(block_BTGZC.reshape(-1, *block_BGZC.shape[1:]))


def compact(cache: LayerCache, streams: Mapping[str, StreamSpec], window: Window, path_BT: Array) -> LayerCache:
    """Moves the accepted path of a tree to consecutive positions after the committed length.

    Args:
      cache: a layer in which T provisional positions stand.
      streams: how it is addressed.
      window: the window of the forward that wrote them.
      path_BT: node index that belongs at each offset; offsets beyond the path may hold anything.
    """

    def move(pages_PGZC: Array, spec: StreamSpec) -> Array:
        if spec.stride > 1 or spec.fixed is not None:
            raise AssertionError("compressed entries hold several positions, states all; trees are refused before")
        return write(pages_PGZC, spec, window, read(pages_PGZC, spec, window, window.first_B[:, None] + path_BT))

    return {name: move(pages, streams[name]) for name, pages in cache.items()}
