"""Computes what one pass of an architecture reads and computes, from its published config, for ``perf``."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.cache.addressing import StreamSpec
from jaxspec.checkpoint.load.load_plan import make_plan
from jaxspec.checkpoint.load.places import abstract_params, flatten
from jaxspec.checkpoint.load.release import release_files
from jaxspec.checkpoint.load.stored import check_method
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.inspect.model_sizes import by_part, cached_bytes, part_of, ring_bytes
from jaxspec.models.arch import ArchSpec, LayerSpec, NoMixer, segments
from jaxspec.models.cache_dtype import with_cache_dtype
from jaxspec.models.catalog import arch_of, known_families
from jaxspec.models.depth import stack_name
from jaxspec.models.family import several
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.compressed_attention import CompressedSpec
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.param import declared, kind_of
from jaxspec.nn.policy import make_policy
from jaxspec.nn.recurrence import RecurrentSpec
from jaxspec.perf.cost import CacheCost, LayerCost, ModelCost
from pallas_kernels.quantized import abstract_quantized

EXPERTS = {"expert", "routed_to"}  # axes as long as there are experts


@dataclass(frozen=True)
class Size:
    """Bytes of a parameter as it lies in memory, and how many numbers it stands for."""

    size_bytes: float
    values: float


Sizes = Mapping[str, Size]


def model_cost(
    config: Mapping[str, Any],
    *,
    name: str = "",
    dtype: str = "bfloat16",
    quantization: str = "auto",
    kv_cache_dtype: str = "auto",
) -> ModelCost:
    """Computes the numbers of a published config; no file is read and nothing allocated.

    Args:
      config: of the model.
      name: for messages, by default the family.
      dtype: of weights that are not quantized, and of the caches.
      quantization: how weights lie in memory, see ``make_plan``.
      kv_cache_dtype: of ``LLM``.

    Raises:
      ConfigError: the config is wrong or not supported.
    """
    arch, kind = with_cache_dtype(arch_of(config), kv_cache_dtype), np.dtype(dtype)
    sizes, prediction = parameter_sizes(config, kind, quantization)
    attention: Any = _attention(arch)
    head = [
        sizes[n]
        for n in ("head_DV" if "head_DV" in sizes else "embed_VD", "project_in_XD", "project_out_DX")
        if n in sizes
    ]
    cost = ModelCost(
        name=name or arch.family,
        model_dim=arch.model_dim,
        vocab_size=arch.vocab_size,
        max_context=arch.max_position,
        layers=tuple(_layers(arch, sizes, kind)),
        head_bytes=sum(x.size_bytes for x in head),
        head_flops=2.0 * sum(x.values for x in head),
        memory_bytes=bytes_by_part(sizes) | bytes_by_part(prediction),
        token_bytes=sum(cached_bytes(arch, kind).values()),
        row_bytes=float(sum(ring_bytes(arch, kind).values())),
        heads=getattr(attention, "heads", 1),
        kv_heads=getattr(attention, "kv_heads", 0),
        chain_only=arch.chain_only,
    )
    if not arch.mtp:
        return cost
    layers = tuple(_prediction_layers(arch, prediction, kind))
    why = arch.chain_only or replace(arch, layers=arch.mtp).chain_only
    name = f"{cost.name}'s multi-token prediction"
    return replace(
        cost, prediction=replace(cost, name=name, layers=layers, memory_bytes=bytes_by_part(prediction), chain_only=why)
    )


def _attention(arch: ArchSpec) -> Any:
    """Returns the attention of the first layer that has one, or the first layer's recurrence."""
    mixers = [layer.attention for layer in arch.layers]
    kinds = (AttentionSpec, LatentSpec, CompressedSpec)
    return next((mixer for mixer in mixers if isinstance(mixer, kinds)), mixers[0])


def parameter_sizes(config: Mapping[str, Any], kind: np.dtype, quantization: str = "auto") -> tuple[Sizes, Sizes]:
    """Returns the sizes of every parameter by path, of the model and of its multi-token prediction.

    The release's list of tensors says what is quantized. It is made with as few experts as the router allows, for
    it would have a hundred thousand names, and what has an axis of experts is then scaled.
    """
    arch, few = arch_of(config), _few_experts(config)
    small, table, plain = arch_of(few), known_tables()[arch.family], make_policy(kind, depth="stacked")
    plan = make_plan(
        Path(), Transformer(small, plain), table.rules(small), block=check_method(few),
        quantization=quantization, files=release_files(few),
    )  # fmt: skip
    formats = dict(plan.net.policy.storage.formats)
    mtp: Any = Mtp(small, plain)
    prediction = flatten(abstract_params(mtp)) if arch.mtp else {}
    for path, leaf in prediction.items():
        form = formats.get(kind_of(path.split("/")))
        prediction[path] = abstract_quantized(leaf.shape, form) if form else leaf
    factor = _experts(arch) / _experts(small)

    def size(path: str, leaf: Any) -> Size:
        times = factor if EXPERTS & {*declared(path).axes} else 1.0
        stored = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(leaf))
        return Size(times * stored, times * math.prod(leaf.shape))

    def sizes(leaves: Mapping[str, Any]) -> Sizes:
        return {path: size(path, leaf) for path, leaf in leaves.items()}

    return sizes(plan.leaves), sizes(prediction)


def _few_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with as few experts as a token chooses and groups need."""
    moe, few = known_families()[config["model_type"]].moe, dict(config)
    key = next((k for k in moe.experts if k in config), None) if moe else None
    if key is not None and moe is not None:
        top_k = next(int(config[k]) for k in several(moe.top_k) if k in config)
        groups = next((int(config[k]) for k in moe.groups[0] if config.get(k)), 1)
        few[key] = math.ceil(max(top_k, 2 * groups) / groups) * groups
    return few


def _experts(arch: ArchSpec) -> int:
    return next((layer.ffn.experts for layer in arch.layers if isinstance(layer.ffn, MoeSpec)), 1)


def bytes_by_part(sizes: Sizes) -> dict[str, float]:
    """Returns the bytes of parameters by the part of the model that they belong to."""
    return {part: float(size) for part, size in by_part((p, round(x.size_bytes)) for p, x in sizes.items()).items()}


def _layers(arch: ArchSpec, sizes: Sizes, kind: np.dtype) -> list[LayerCost]:
    """Returns layers by kind, in the order of ``kinds``."""
    stacks = {s.pattern[i]: (stack_name(s, i), s.repeats) for s in segments(arch.layers) for i in range(len(s.pattern))}
    counts = Counter(arch.layers)
    costs = []
    indexes = (getattr(spec.attention, "index", None) for spec in arch.layers)
    lent = next((index.top_k for index in indexes if index is not None), None)
    for spec in dict.fromkeys(arch.layers):
        name, repeats = stacks[spec]
        own = {path: size for path, size in sizes.items() if path.startswith(f"{name}/")}
        caches = [cache for half in spec.halves for cache in cache_costs(half.attention, kind, lent)]
        costs.append(layer_cost(spec, own, repeats, counts[spec], caches))
    return costs


def routed_order(arch: ArchSpec) -> list[int]:
    """Returns, for each routed layer of ``ModelCost.layers``, its number among the model's routed layers."""
    routed = [spec for spec in arch.layers if isinstance(spec.ffn, MoeSpec)]
    return [i for one in dict.fromkeys(routed) for i, spec in enumerate(routed) if spec == one]


def _prediction_layers(arch: ArchSpec, sizes: Sizes, kind: np.dtype) -> list[LayerCost]:
    costs = []
    for number, spec in enumerate(arch.mtp):
        # A head of its own is as large as the model's, which counts already.
        own = {p: x for p, x in sizes.items() if p.startswith(f"mtp_{number}/") and declared(p).part != "head"}
        costs.append(layer_cost(spec, own, 1, 1, cache_costs(spec.attention, kind, None)))
    return costs


def layer_cost(spec: LayerSpec, sizes: Sizes, repeats: int, count: int, caches: list[CacheCost]) -> LayerCost:
    """Returns what layers cost that are alike.

    Args:
      spec: of each.
      sizes: of their parameters, in which ``repeats`` layers are stacked.
      repeats: see there.
      count: how many layers there are.
      caches: of each.
    """
    routed = [size for path, size in sizes.items() if _is_routed(path)]
    dense = [size for path, size in sizes.items() if not _is_routed(path) and declared(path).kind != "table"]
    ffn = spec.ffn
    experts, top_k = (ffn.experts, ffn.top_k) if isinstance(ffn, MoeSpec) else (0, 0)
    each = experts * repeats or 1
    return LayerCost(
        count=count,
        dense_bytes=sum(x.size_bytes for x in dense) / repeats,
        dense_flops=2.0 * sum(x.values for x in dense) / repeats,
        caches=tuple(caches),
        experts=experts,
        top_k=top_k,
        expert_bytes=sum(x.size_bytes for x in routed) / each,
        expert_flops=2.0 * sum(x.values for x in routed) / each,
    )


def _is_routed(path: str) -> bool:
    """Whether a parameter belongs to routed experts, those of multi-token prediction too."""
    return part_of(path.partition("/")[2] if path.startswith("mtp_") else path) == "routed experts"


def cache_costs(spec: Any, kind: np.dtype, lent: int | None) -> list[CacheCost]:
    """Returns what attention reads: every stream once for all queries of a row, and each query's products with it.

    Args:
      spec: of the attention.
      kind: compute dtype.
      lent: positions that a layer keeps that reuses the selection of another.
    """

    def cache(stream: StreamSpec, flops: float, keeps: int | None = None) -> CacheCost:
        size = np.dtype(stream.dtype or kind).itemsize * stream.heads * stream.width
        return CacheCost(size, stream.heads, stream.stride, stream.reach, keeps, flops)

    streams = spec.streams
    if isinstance(spec, AttentionSpec):
        products = {name: 2.0 * spec.heads * streams[name].width for name in ("k", "v")}
        return [cache(stream, products.get(name, 0.0)) for name, stream in streams.items()]
    if isinstance(spec, LatentSpec):
        keeps = spec.index.top_k if spec.index else lent if spec.reuses_selection else None
        caches = [cache(streams["latent"], 2.0 * spec.heads * (2 * spec.rank + spec.rope.dim), keeps)]
        if spec.index:
            caches.append(cache(spec.index.stream, 2.0 * spec.index.heads * spec.index.head_dim))
        return caches
    if isinstance(spec, CompressedSpec):
        each = 4.0 * spec.heads * spec.head_dim
        caches = [cache(streams["kv"], each)]
        if spec.compressor is not None:
            keeps = spec.index.top_k if spec.index else None
            caches += [cache(streams["entry"], each, keeps), cache(streams["raw"], 0.0)]
        if spec.index is not None:
            keys, heads = spec.index.compressor, spec.index.heads
            caches += [cache(keys.entries, 2.0 * heads * keys.head_dim), cache(keys.raw, 0.0)]
        return caches
    state = getattr(spec, "recurrence", None)
    if state is not None or isinstance(spec, NoMixer):
        return [] if state is None else _state_costs(state)
    raise AssertionError(f"no costs are known for {type(spec).__name__}")


def _state_costs(spec: RecurrentSpec) -> list[CacheCost]:
    """Returns what a recurrence reads and writes: state and tail once per pass, and what each position adds.

    Of every number of the state a position decays, compares, adds and reads: seven operations.
    """
    numbers, wide = spec.heads * spec.key_dim * spec.value_dim, 4.0 * (spec.channels + spec.gates)
    tail = 4.0 * (spec.taps - 1) * spec.channels
    state = CacheCost(2 * (4.0 * numbers + tail), max(spec.heads, 1), entry_flops=7.0 * numbers, fixed=True)
    return [state, CacheCost(2 * wide, reach=0, entry_flops=2.0 * spec.taps * spec.channels)]
