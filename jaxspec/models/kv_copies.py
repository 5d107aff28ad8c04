"""Copies of key-value heads, where a mesh has more devices along ``tensor`` than a model has of these heads."""

from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.policy import Compute
from jaxspec.pytree import replace


def with_kv_copies(arch: ArchSpec, compute: Compute) -> ArchSpec:
    """Returns the architecture with as many copies of each key-value head as give every device one.

    A copy serves its part of the head's queries, so nothing is computed twice but keys and values. Heads that cannot be
    shared out so stay as they are, and are then whole on every device; so do all where XLA computes.
    """
    mesh = compute.mesh
    devices = 1 if mesh is None or compute.kernels == "xla" else mesh.shape.get("tensor", 1)
    if devices == 1:
        return arch
    layers, mtp = (tuple(_copied(layer, devices) for layer in some) for some in (arch.layers, arch.mtp))
    return replace(arch, layers=layers, mtp=mtp)


def without_kv_copies(arch: ArchSpec) -> ArchSpec:
    """Returns the architecture as it was published."""
    layers, mtp = (tuple(_copied(layer, 1) for layer in some) for some in (arch.layers, arch.mtp))
    return replace(arch, layers=layers, mtp=mtp)


def _copied(layer: LayerSpec, devices: int) -> LayerSpec:
    spec = layer.attention
    if not isinstance(spec, AttentionSpec):
        return layer
    copies = _copies(spec, devices)
    heads = spec.kv_heads // spec.kv_copies * copies
    return replace(layer, attention=replace(spec, kv_heads=heads, kv_copies=copies))


def _copies(spec: AttentionSpec, devices: int) -> int:
    """Returns how many of each head so many devices want, 1 where heads cannot be shared out."""
    published = spec.kv_heads // spec.kv_copies
    joined = spec.value_width == spec.head_dim and not spec.shared_values and spec.qk_norm != "full"
    fits = joined and not devices % published and not spec.heads % devices
    return devices // published if fits and devices > published else 1
