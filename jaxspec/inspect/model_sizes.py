"""Sizes of a model: parameters and bytes by part, those that a token uses, and what it leaves in the caches."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.cache.addressing import entries
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.load_plan import LoadPlan
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.param import declared

DRAFTS = 8  # of a verification, where nothing says how many
PREDICTION = "multi-token prediction"
PARTS: tuple[str, ...] = (
    "embedding", "attention", "dense feed-forward", "routed experts", "shared experts", "router", "hyper-connections",
    "norms", "head", PREDICTION,
)  # fmt: skip


def part_of(path: str) -> str:
    """Returns which of ``PARTS`` a parameter belongs to."""
    folders, param = path.split("/")[:-1], declared(path)
    if path.startswith("mtp_"):
        return PREDICTION
    if param.kind == "norm":
        return "norms"
    if any("hyper" in folder for folder in folders):
        return "hyper-connections"
    if "attention" in folders:
        return "attention"
    if param.part or "ffn" not in folders:
        return param.part or "embedding"
    if "shared" in folders:
        return "shared experts"
    return "dense feed-forward"


def by_part(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums of amounts by the part of their paths, in the order of ``PARTS``; empty parts are left out."""
    sums = dict.fromkeys(PARTS, 0)
    for path, amount in amounts:
        sums[part_of(path)] += amount
    return {part: amount for part, amount in sums.items() if amount}


def parameters(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Counts parameters by part, a quantized weight as what it stands for; tables of token ids count nothing."""
    counted = {path: leaf for path, leaf in leaves.items() if declared(path).kind != "table"}
    return by_part((path, math.prod(leaf.shape)) for path, leaf in counted.items())


def memory_bytes(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Returns bytes by part as the parameters lie in memory, scales included."""
    return by_part(
        (path, sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in jax.tree.leaves(leaf)))
        for path, leaf in leaves.items()
    )


def file_bytes(plan: LoadPlan) -> dict[str, int]:
    """Returns bytes by part of what a plan reads from the files, scales included."""
    path_of = {
        name: path for path, leaf in plan.rules_by_leaf.items() for rule in leaf.rules.values() for name in rule.names
    }
    path_by_tensor = {t.whole: path_of[s.name] for s in plan.stored.values() for t in s.tensors}
    return by_part((path, _size(plan.files, name)) for name, path in path_by_tensor.items())


def _size(files: TensorFiles, name: str) -> int:
    tensor = files.tensors.get(name)
    return tensor.end - tensor.begin if tensor else 0


def idle_parameters(layers: Iterable[LayerSpec], model_dim: int) -> int:
    """Counts parameters that one token leaves out: those of the experts that no router chooses for it."""
    moe = [layer.ffn for layer in layers if isinstance(layer.ffn, MoeSpec)]
    return sum(
        math.prod(shape) // s.experts * (s.experts - s.top_k) for s in moe for shape in s.shapes(model_dim).values()
    )


def cached_bytes(arch: ArchSpec, dtype: np.dtype) -> dict[str, float]:
    """Returns bytes by stream that each further token adds to the caches, in the stream's or the compute dtype."""
    sums: dict[str, float] = {}
    for layer in arch.layers:
        for name, s in layer.streams.items():
            if s.reach is None and s.fixed is None:
                size = np.dtype(s.dtype or dtype).itemsize
                sums[name] = sums.get(name, 0) + s.heads * s.width * size / s.stride
    return sums


def ring_bytes(
    arch: ArchSpec, dtype: np.dtype, *, slack: int = 256, block: int = 128, drafts: int = DRAFTS
) -> dict[str, int]:
    """Returns bytes by stream of what every row keeps however long its text: windows, raw parts of entries, states.

    Args:
      arch: of the model.
      dtype: compute dtype.
      slack: most positions that one forward writes.
      block: positions that attention reads at a time.
      drafts: most drafts of one forward.
    """
    sums: dict[str, int] = {}
    for layer in arch.layers:
        for name, s in layer.streams.items():
            size = np.dtype(s.dtype or dtype).itemsize * s.heads * s.width
            if s.fixed is not None:
                sums[name] = sums.get(name, 0) + (s.fixed or drafts) * size
            elif s.reach is not None:
                sums[name] = sums.get(name, 0) + entries(s, arch.max_position, slack, block) * size
    return sums
