"""The cost of a draft head, and its experts, from the headers of its files."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.heads.directory import plan_head
from jaxspec.errors import ConfigError
from jaxspec.inspect.model_cost import Size, bytes_by_part, cache_costs, layer_cost
from jaxspec.inspect.model_sizes import idle_parameters, parameters
from jaxspec.models.arch import chosen_of, experts_of
from jaxspec.models.block_head import BlockHead
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead
from jaxspec.nn.policy import make_policy
from jaxspec.perf.cost import LayerCost, ModelCost
from jaxspec.perf.drafting import DraftCost


def head_cost(directory: Path, config: Mapping[str, Any], target: ModelCost, dtype: str = "bfloat16") -> DraftCost:
    """Returns what drafting with a head costs; of experts a pass reads those that it touches.

    Args:
      directory: of the head, whose headers are read.
      config: of its target.
      target: its cost, for the vocabulary product where the head has none of its own.
      dtype: of its parameters.

    Raises:
      ConfigError: the head is not for this target, or drafts in a way whose cost is not known.
      CheckpointError: files are unreadable.
    """
    plan, kind = plan_head(directory, arch_of(config), make_policy(dtype)), np.dtype(dtype)
    net = plan.net
    if not isinstance(net, DraftHead | BlockHead) or (isinstance(net, DraftHead) and net.spec.mask_token is not None):
        raise ConfigError(
            f"plan: {directory} is a head whose cost is not known; known are those that draft one token after another "
            "(EAGLE) and those that draft blocks; medusa stands for heads of that kind"
        )
    sizes = {path: _size(leaf) for path, leaf in plan.leaves.items()}
    arch, layers = net.spec.arch, []
    for y, spec in enumerate(arch.layers):
        path = _layer_path(net, y)
        own = {name: size for name, size in sizes.items() if name.startswith(path)}
        layers.append(layer_cost(spec, own, 1, 1, cache_costs(spec.attention, kind, None)))
    paths = tuple(_layer_path(net, y) for y in range(len(layers)))
    beside = [s for name, s in sizes.items() if not name.startswith((*paths, "embed_VD", "head_DW"))]
    head = sizes.get("head_DW")
    model = ModelCost(
        f"head {directory.name}", arch.model_dim, arch.vocab_size, target.max_context,
        (_with(layers[0], beside), *layers[1:]),
        target.head_bytes if head is None else head.size_bytes, target.head_flops if head is None else 2 * head.values,
        bytes_by_part(sizes), token_bytes=sum(c.entry_bytes for layer in layers for c in layer.caches),
        heads=target.heads, chain_only=target.chain_only,
    )  # fmt: skip
    return DraftCost("eagle", model, net.spec.block_size if isinstance(net, BlockHead) else 0)


def experts_in_words(directory: Path, config: Mapping[str, Any]) -> str:
    """Returns what experts a head for a target's config has and what a token goes through, empty where it has none."""
    plan = plan_head(directory, arch_of(config), make_policy("bfloat16"))
    arch = getattr(getattr(plan.net, "spec", None), "arch", None)
    if arch is None or not arch.expert_layers:
        return ""
    every, idle = sum(parameters(plan.leaves).values()), idle_parameters(arch.layers, arch.model_dim)
    layers = f"{len(arch.expert_layers)} of {len(arch.layers)} layers"
    words = f"{experts_of(arch)} experts in {layers}, {chosen_of(arch)} for a token"
    return f"{words}: {every - idle:,} of {every:,} parameters"


def _layer_path(net: DraftHead | BlockHead, y: int) -> str:
    if isinstance(net, BlockHead):
        return f"layers_{y}/"
    return f"layers_{y - 1}/" if y else "first/"


def _size(leaf: Any) -> Size:
    values = math.prod(leaf.shape)
    return Size(values * np.dtype(leaf.dtype).itemsize, values)


def _with(layer: LayerCost, beside: list[Size]) -> LayerCost:
    """Adds parameters that are read once per pass to those of a layer."""
    return replace(
        layer,
        dense_bytes=layer.dense_bytes + sum(x.size_bytes for x in beside),
        dense_flops=layer.dense_flops + 2.0 * sum(x.values for x in beside),
    )
