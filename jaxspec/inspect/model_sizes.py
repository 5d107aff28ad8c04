"""How big a model is: parameters and bytes by part, what a token uses, and what a token leaves in the caches."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.cache.addressing import entries
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.load_plan import LoadPlan
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.nn.moe import ROUTED, MoeSpec, own_name

PREDICTION = "multi-token prediction"
PARTS: tuple[str, ...] = (
    "embedding", "attention", "dense feed-forward", "routed experts", "shared experts", "router", "hyper-connections",
    "norms", "head", PREDICTION,
)  # fmt: skip
OWN = tuple(own_name(name) for name in ROUTED)
NORM = re.compile(r"(^|_)norm_")


def part_of(path: str) -> str:
    """Which of ``PARTS`` a parameter belongs to."""
    *folders, name = path.split("/")
    if path.startswith("mtp_"):
        return PREDICTION
    if NORM.search(name):
        return "norms"
    if any("hyper" in folder for folder in folders):
        return "hyper-connections"
    if "attention" in folders:
        return "attention"
    if "ffn" in folders:
        return _feed_forward_part(folders, name)
    return "head" if name in ("head_DV", "project_out_DX") else "embedding"


def _feed_forward_part(folders: list[str], name: str) -> str:
    if "shared" in folders or name.startswith("shared_gate"):
        return "shared experts"
    if name.startswith(("router", "choice_bias", "table", "slots")):
        return "router"
    base, _, number = name.rpartition("_")
    routed = name in ROUTED or (number.isdigit() and base in OWN)
    return "routed experts" if routed else "dense feed-forward"


def by_part(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums of amounts by the part of their paths, in the order of ``PARTS``; empty parts are left out."""
    found = dict.fromkeys(PARTS, 0)
    for path, amount in amounts:
        found[part_of(path)] += amount
    return {part: amount for part, amount in found.items() if amount}


def parameters(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Parameters by part, a quantised weight counted as what it stands for; tables of token ids count nothing."""
    return by_part((path, math.prod(leaf.shape)) for path, leaf in leaves.items() if not path.endswith("table_VA"))


def memory_bytes(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by part as the parameters lie in memory, scales included."""
    return by_part(
        (path, sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in jax.tree.leaves(leaf)))
        for path, leaf in leaves.items()
    )


def file_bytes(plan: LoadPlan) -> dict[str, int]:
    """Bytes by part of what a plan reads from the files, scales included."""
    path_of = {
        name: path for path, leaf in plan.rules_by_leaf.items() for rule in leaf.rules.values() for name in rule.names
    }
    whole = {t.whole: path_of[s.name] for s in plan.stored.values() for t in s.tensors}
    return by_part((path, _size(plan.files, name)) for name, path in whole.items())


def _size(files: TensorFiles, name: str) -> int:
    tensor = files.tensors.get(name)
    return tensor.end - tensor.begin if tensor else 0


def idle_parameters(layers: Iterable[LayerSpec], model_dim: int) -> int:
    """Parameters that one token leaves out: those of the experts that no router chooses for it."""
    moe = [layer.ffn for layer in layers if isinstance(layer.ffn, MoeSpec)]
    return sum(
        math.prod(shape) // s.experts * (s.experts - s.top_k) for s in moe for shape in s.shapes(model_dim).values()
    )


def cached_values(arch: ArchSpec, layers: tuple[LayerSpec, ...] | None = None) -> dict[str, float]:
    """Values by stream that each further token adds to the caches, those of windows left out."""
    found: dict[str, float] = {}
    for layer in arch.layers if layers is None else layers:
        for name, s in layer.attention.streams.items():
            if s.reach is None:
                found[name] = found.get(name, 0) + s.heads * s.width / s.stride
    return found


def cached_bytes(arch: ArchSpec, dtype: np.dtype) -> dict[str, float]:
    """Bytes by stream that each further token adds to the caches, in the compute dtype where a stream has no other."""
    found: dict[str, float] = {}
    for layer in arch.layers:
        for name, s in layer.attention.streams.items():
            if s.reach is None:
                size = np.dtype(s.dtype or dtype).itemsize
                found[name] = found.get(name, 0) + s.heads * s.width * size / s.stride
    return found


def ring_bytes(arch: ArchSpec, dtype: np.dtype, *, slack: int = 256, block: int = 128) -> dict[str, int]:
    """Bytes by stream of the rings that every row keeps whatever its length: windows, and raw parts of entries.

    Args:
      arch: of the model.
      dtype: compute dtype.
      slack: most positions that one forward writes.
      block: positions that attention reads at a time.
    """
    found: dict[str, int] = {}
    for layer in arch.layers:
        for name, s in layer.attention.streams.items():
            if s.reach is not None:
                size = np.dtype(s.dtype or dtype).itemsize * s.heads * s.width
                found[name] = found.get(name, 0) + entries(s, arch.max_position, slack, block) * size
    return found
