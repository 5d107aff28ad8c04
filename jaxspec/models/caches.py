"""The caches of a whole model: one per layer, or one per stack of equal layers."""

import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec, init_layer
from jaxspec.cache.tree_reads import compact
from jaxspec.cache.window import Window
from jaxspec.models.arch import ArchSpec, segments
from jaxspec.models.transformer import Caches
from jaxspec.nn.policy import Policy
from jaxspec.pytree import replace
from jaxspec.shapes import Array

Layout = tuple[tuple[dict[str, StreamSpec], int], ...]


def layout(arch: ArchSpec, policy: Policy) -> Layout:
    """Returns what each cache holds, and how many layers share it."""
    if policy.layout.depth == "unrolled":
        return tuple((dict(layer.attention.streams), 1) for layer in arch.layers)
    cut = segments(arch.layers)
    return tuple((dict(layer.attention.streams), part.repeats) for part in cut for layer in part.pattern)


def init_caches(
    arch: ArchSpec,
    policy: Policy,
    rows: int,
    room: int,
    *,
    slack: int,
    block: int = 128,
    pool: tuple[int, int] | None = None,
) -> Caches:
    """Allocates the zeroed caches of a model.

    Args:
      arch: says what each layer caches.
      policy: compute dtype, and whether layers are stacked.
      rows: B.
      room: positions of a row, provisional ones included.
      slack: most positions that one forward writes.
      block: positions that attention reads at a time.
      pool: page count and page size of a shared pool; None gives every row one page of its own.
    """
    dtype = jnp.dtype(policy.compute.dtype)
    return tuple(
        init_layer(streams, rows, room, slack, block, dtype, pool, layers, as_bits=policy.compute.kernels != "triton")
        for streams, layers in layout(arch, policy)
    )


def compact_caches(caches: Caches, arch: ArchSpec, policy: Policy, window: Window, path_BT: Array) -> Caches:
    """Moves the accepted path of a tree to consecutive positions in every layer."""
    done, window = [], replace(window, rows_sharded=policy.compute.splits_rows)
    for cache, (streams, layers) in zip(caches, layout(arch, policy), strict=True):
        if layers == 1:
            done.append(compact(cache, streams, window, path_BT))
            continue
        pages = next(iter(cache.values())).shape[0] // layers

        def one(y: Array, cache: LayerCache, streams=streams, pages=pages) -> LayerCache:
            return compact(cache, streams, replace(window, base=y * jnp.int32(pages)), path_BT)

        done.append(lax.fori_loop(0, layers, one, cache))
    return tuple(done)
