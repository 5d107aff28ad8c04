"""The caches of a whole model: one per layer, or one per stack of equal layers."""

from collections.abc import Iterable

import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import CacheSize, LayerCache, StreamSpec, init_layer
from jaxspec.cache.tree_reads import compact
from jaxspec.cache.window import Window
from jaxspec.models.arch import ArchSpec, LayerSpec, segments
from jaxspec.models.transformer import Caches
from jaxspec.nn.inputs import written_by
from jaxspec.nn.policy import Policy
from jaxspec.pytree import replace
from jaxspec.shapes import Array

Layout = tuple[tuple[dict[str, StreamSpec], int], ...]


def layout(arch: ArchSpec, policy: Policy) -> Layout:
    """Returns what each cache holds, and how many layers share it."""
    if policy.layout.depth == "unrolled":
        return unstacked(arch.layers)
    cut = segments(arch.layers)
    return tuple((layer.streams, part.repeats) for part in cut for layer in part.pattern)


def unstacked(layers: Iterable[LayerSpec]) -> Layout:
    """Returns what each cache holds of layers that are never stacked: of a head, or of multi-token prediction."""
    return tuple((layer.streams, 1) for layer in layers)


def init_caches(arch: ArchSpec, policy: Policy, size: CacheSize) -> Caches:
    """Allocates the zeroed caches of a model, stacked like its layers."""
    return _zeros(layout(arch, policy), policy, size)


def init_layer_caches(layers: Iterable[LayerSpec], policy: Policy, size: CacheSize) -> Caches:
    """Allocates the zeroed caches of layers that are never stacked."""
    return _zeros(unstacked(layers), policy, size)


def _zeros(layout: Layout, policy: Policy, size: CacheSize) -> Caches:
    dtype, as_bits = jnp.dtype(policy.compute.dtype), policy.compute.kernels != "triton"
    return tuple(init_layer(streams, size, dtype, layers=layers, as_bits=as_bits) for streams, layers in layout)


def compact_caches(caches: Caches, arch: ArchSpec, policy: Policy, window: Window, path_BT: Array) -> Caches:
    """Moves the accepted path of a tree to consecutive positions in every layer."""
    done, window = [], written_by(window, policy.compute)
    for cache, (streams, layers) in zip(caches, layout(arch, policy), strict=True):
        if layers == 1:
            done.append(compact(cache, streams, window, path_BT))
            continue
        pages = next(iter(cache.values())).shape[0] // layers

        def one(y: Array, cache: LayerCache, streams=streams, pages=pages) -> LayerCache:
            return compact(cache, streams, replace(window, layer=y, layer_pages=pages), path_BT)

        done.append(lax.fori_loop(0, layers, one, cache))
    return tuple(done)
