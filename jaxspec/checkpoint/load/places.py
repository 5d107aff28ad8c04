"""Resolves a table's published tensors to leaves of the parameters, and to entries of their leading axes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.load.slots import TABLE, ExpertSlots
from jaxspec.checkpoint.names.copies import shape_without_copies
from jaxspec.checkpoint.names.packs import PACKS
from jaxspec.checkpoint.names.table import NameRule
from jaxspec.models.arch import ArchSpec, LayerSpec, Segment, segments
from jaxspec.models.depth import stack_of
from jaxspec.models.transformer import Transformer
from jaxspec.native.packing import Packed
from jaxspec.nn.param import kind_of
from jaxspec.shapes import Params
from pallas_kernels.quantized import Quantized, abstract_quantized

# What the name tables call a parameter of one expert, and the parameter of all of them.
STACKED = {
    "gate_up_D2F": "gate_up_ED2F", "down_FD": "down_EFD", "gate_up_bias_2F": "gate_up_bias_E2F",
    "down_bias_D": "down_bias_ED",
}  # fmt: skip
NO_SLOTS: Mapping[str, ExpertSlots] = {}


@dataclass(frozen=True)
class TargetLeaf:
    """One parameter and the rules that fill it.

    Attributes:
      shape: of the whole parameter.
      lead: how many leading axes count layers and experts.
      rules: by entry of those axes.
    """

    shape: tuple[int, ...]
    lead: int
    rules: dict[tuple[int, ...], NameRule]

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of what one rule fills."""
        return self.shape[self.lead :]


@cache
def abstract_params(net: Any) -> Params:
    """Shapes and dtypes of every parameter of a network, its multi-token prediction or a head, nothing allocated.

    Equal layers are looked at once, so that depth costs no time.
    """
    policy, once = net.policy, isinstance(net, Transformer) and net.policy.layout.depth == "unrolled"
    layers = net.arch.layers if once else ()
    distinct = tuple(dict.fromkeys(layers))
    small = net.clone(policy=policy.update(formats=(), kernels="xla"))
    small = small.clone(arch=replace(net.arch, layers=distinct)) if once else small
    leaves: dict[str, Any] = {}
    for path, leaf in flatten(jax.eval_shape(small.initial, jax.random.key(0))["params"]).items():
        for whole in _layers(path, layers, distinct) if once else (path,):
            leaves[whole] = leaf
    for path, leaf in leaves.items():
        form = policy.storage.format_of(kind_of(path.split("/")))
        leaves[path] = leaf if form is None else abstract_quantized(leaf.shape, form)
    return unflatten(leaves)


def _layers(path: str, layers: tuple[LayerSpec, ...], distinct: tuple[LayerSpec, ...]) -> list[str]:
    """Paths of one parameter in all layers that are like its own."""
    first, _, rest = path.partition("/")
    if not first.startswith("layers_"):
        return [path]
    like = distinct[int(first.removeprefix("layers_"))]
    return [f"layers_{y}/{rest}" for y, layer in enumerate(layers) if layer == like]


def flatten(params: Any) -> dict[str, Any]:
    """Leaves by path, parts joined with a slash; a quantized or packed weight is one leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, Quantized | Packed))[0]
    return {"/".join(part.key for part in path): leaf for path, leaf in leaves}


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """The inverse of ``flatten``."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def resolve_rules(
    rules: Iterable[NameRule],
    leaves: Mapping[str, Any],
    arch: ArchSpec | None = None,
    slots_by_layer: Mapping[str, ExpertSlots] = NO_SLOTS,
) -> dict[str, TargetLeaf]:
    """Returns what fills each leaf; rules whose parameter is not there are left out.

    Args:
      rules: of a table.
      leaves: abstract parameters by path.
      arch: says which layers lie in one stack, None where none do.
      slots_by_layer: which slots an expert's weights fill, by the path of its layer; one of its own number elsewhere.
    """
    cut = _cut(leaves, arch)
    leaves_by_path: dict[str, TargetLeaf] = {}
    for rule in rules:
        for path, index in _place(rule.leaf, leaves, cut, slots_by_layer):
            leaf = leaves_by_path.setdefault(path, TargetLeaf(leaves[path].shape, len(index), {}))
            leaf.rules[index] = rule
    return leaves_by_path


def tables(
    slots_by_layer: Mapping[str, ExpertSlots], leaves: Mapping[str, Any], arch: ArchSpec | None
) -> dict[str, np.ndarray]:
    """The parameters that say which slots an expert has; arguments as of ``resolve_rules``."""
    cut = _cut(leaves, arch)
    leaves_by_path: dict[str, np.ndarray] = {}
    for folder, own in slots_by_layer.items():
        path, index = _stacked(f"{folder}/{TABLE}", cut)
        whole = leaves_by_path.setdefault(path, np.empty(leaves[path].shape, np.int32))
        whole[index] = own.table(whole.shape[-1])
    return leaves_by_path


def _cut(leaves: Mapping[str, Any], arch: ArchSpec | None) -> tuple[Segment, ...]:
    return tuple(segments(arch.layers)) if arch and any(path.startswith("segment_") for path in leaves) else ()


def _stacked(path: str, cut: tuple[Segment, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns where a layer's parameter lies if layers are stacked: the stack's parameter, and the place in it."""
    layer, _, rest = path.partition("/")
    if not (layer.startswith("layers_") and cut):
        return path, ()
    stack, place, _ = stack_of(int(layer.removeprefix("layers_")), cut)
    return f"{stack}/{rest}", (place,)


def _place(
    rule: str, leaves: Mapping[str, Any], cut: tuple[Segment, ...], slots_by_layer: Mapping[str, ExpertSlots]
) -> list[tuple[str, tuple[int, ...]]]:
    path, index = _stacked(rule, cut)
    if path in leaves:
        return [(path, index)]
    folder, _, name = path.rpartition("/")
    base, _, number = name.rpartition("_")
    if base not in STACKED or f"{folder}/{STACKED[base]}" not in leaves:
        return []
    own = slots_by_layer.get(rule.rpartition("/")[0])
    filled = (int(number),) if own is None else own.filled_by(int(number))
    return [(f"{folder}/{STACKED[base]}", (*index, slot)) for slot in filled]


def hub_shapes(leaf: TargetLeaf, rule: NameRule) -> list[tuple[int, ...]]:
    """Shapes of what the published tensors of one rule stand for."""
    return part_shapes(rule.pack, shape_without_copies(leaf.part, rule.copies))


@cache
def part_shapes(pack: str, part: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of the arrays that a pack makes a part of a parameter of."""
    return [array.shape for array in PACKS[pack].split(np.broadcast_to(np.zeros((), np.int8), part))]
