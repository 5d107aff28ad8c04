"""What becomes of a checkpoint directory's tensors: which parameter each feeds, what stays quantised, what is wrong."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.places import (
    NO_SLOTS,
    TargetLeaf,
    abstract_params,
    flatten,
    hub_shapes,
    resolve_rules,
    tables,
)
from jaxspec.checkpoint.load.slots import ExpertSlots
from jaxspec.checkpoint.load.stored import FP8_BLOCK, PLAIN, SUPPORTED, Stored, other_scheme, storage_faults, storage_of
from jaxspec.checkpoint.names.packs import PACKS
from jaxspec.checkpoint.names.table import Rule
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.nn.param import kind_of
from jaxspec.nn.policy import Policy
from jaxspec.nn.quantized import Format, abstract_quantized

QUANTIZATIONS = ("auto", "none", "fp8", "int8")
WORDS = {"missing": "missing", "extra": "not known", "shape": "of the wrong shape", "dtype": "of the wrong dtype"}

# What quantization=fp8 and int8 leave as it is, besides everything outside of attention and feed-forward layers.
FOLDERS = ("attention", "ffn", "ffn/shared")
NEVER = ("router_DE", "shared_gate_D1", "table_VA")


@dataclass(frozen=True)
class LoadPlan:
    """How one network is loaded.

    Attributes:
      directory: the checkpoint.
      files: its tensors.
      leaves: every parameter by path: shape and dtype, or a ``Quantized`` of such.
      rules_by_leaf: the rules of each.
      stored: how each tensor of the rules is stored, missing ones left out.
      policy: with the formats of what stays quantised.
      problems: what is wrong, by the keys of ``WORDS``.
      computed: parameters that no tensor fills, by path.
      net: the network, with that policy.
    """

    directory: Path
    files: TensorFiles
    leaves: Mapping[str, Any]
    rules_by_leaf: Mapping[str, TargetLeaf]
    stored: Mapping[str, Stored]
    policy: Policy
    problems: dict[str, list[str]] = field(default_factory=dict)
    computed: Mapping[str, np.ndarray] = field(default_factory=dict)
    net: Any = None

    def check(self) -> None:
        """Lets only sound checkpoints pass.

        Raises:
          CheckpointError: names every missing, extra and misshaped tensor at once.
        """
        text = [f"{len(p)} {WORDS[kind]}: " + ", ".join(p) for kind, p in self.problems.items() if p]
        if text:
            raise CheckpointError(f"{self.directory}: tensors do not match config.json; " + "; ".join(text))

    def kinds(self) -> dict[str, Format | None]:
        """Format of each kind of parameter, None for plain ones."""
        return {_kind(path): self.policy.storage.format_of(_kind(path)) for path in self.leaves}


def make_plan(
    directory: Path,
    net: Any,
    rules: Iterable[Rule],
    *,
    beside: tuple[str, ...] | None = None,
    ignored: tuple[str, ...] = (),
    block: tuple[int, int] = FP8_BLOCK,
    quantization: str = "auto",
    files: TensorFiles | None = None,
    slots_by_layer: Mapping[str, ExpertSlots] = NO_SLOTS,
) -> LoadPlan:
    """Compares a network with the tensors of a directory, of which only the headers are read.

    Args:
      directory: the checkpoint.
      net: network with ``arch``, ``policy`` and ``initial``.
      rules: of a name table.
      beside: beginnings of published names that are not loaded; None if it does not matter what else there is.
      ignored: endings of such names.
      block: numbers per scale of fp8 weights.
      quantization: ``auto`` keeps what is published quantised, ``none`` widens it, ``fp8`` and ``int8`` quantise the
        matrices of attention and feed-forward layers.
      files: the directory's tensors, where they are known already or only promised.
      slots_by_layer: slots of experts, see ``resolve_rules``.

    Raises:
      ConfigError: the quantisation is not known, or the checkpoint already has another.
      CheckpointError: files are unreadable, or quantised in a way that is not supported.
    """
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization {quantization!r} is not known; known are {', '.join(QUANTIZATIONS)}")
    files = TensorFiles(directory) if files is None else files
    leaves = flatten(abstract_params(net.clone(policy=net.policy.update(formats=()))))
    rules_by_leaf, computed = (
        resolve_rules(rules, leaves, net.arch, slots_by_layer),
        tables(slots_by_layer, leaves, net.arch),
    )
    unnamed = [path for path, leaf in rules_by_leaf.items() if len(leaf.rules) != int(np.prod(leaf.shape[: leaf.lead]))]
    unnamed += [path for path in leaves if path not in rules_by_leaf and path not in computed]
    assert not unnamed, f"parameters that no rule of the name table fills: {unnamed}"
    names = {name for leaf in rules_by_leaf.values() for rule in leaf.rules.values() for name in rule.hub}
    stored = {name: found for name in names if (found := storage_of(files, name, block))}
    problems = mismatches(files, rules_by_leaf, leaves, stored)
    if beside is not None:
        extra = _extra(files, stored, names, beside, ignored)
        scheme = other_scheme(extra)
        if scheme:
            raise CheckpointError(f"{directory}: its weights are {scheme}, which is not supported; {SUPPORTED}")
        problems["extra"] = extra
    if quantization in ("fp8", "int8"):
        stored |= _to_quantise(directory, files, rules_by_leaf, stored, quantization)
    formats = {} if quantization == "none" else _formats(rules_by_leaf, stored)
    for path, leaf in leaves.items():
        if _kind(path) in formats:
            leaves[path] = abstract_quantized(leaf.shape, formats[_kind(path)])
    policy = net.policy.update(formats=tuple(sorted(formats.items())))
    return LoadPlan(
        directory, files, leaves, rules_by_leaf, stored, policy, problems, computed, net.clone(policy=policy)
    )


def _kind(path: str) -> str:
    return kind_of(path.split("/"))


def mismatches(
    files: TensorFiles, rules_by_leaf: Mapping[str, TargetLeaf], leaves: Mapping[str, Any], stored: Mapping[str, Stored]
) -> dict[str, list[str]]:
    """Names of tensors that are missing, of the wrong shape or of the wrong dtype, by the keys of ``WORDS``."""
    found: dict[str, list[str]] = {"missing": [], "extra": [], "shape": [], "dtype": []}
    entries: dict[str, int] = {}
    for path, leaf in rules_by_leaf.items():
        for rule in leaf.rules.values():
            for name, shape in zip(rule.hub, hub_shapes(leaf, rule), strict=True):
                whole, _, entry = name.partition("[")
                if name not in stored:
                    found["missing"].append(whole)
                    continue
                if stored[name].shape != shape:
                    found["shape"].append(f"{name}: {stored[name].shape} in the file, {shape} by the config")
                if entry:
                    tensor = stored[name].data.partition("[")[0]
                    entries[tensor] = max(entries.get(tensor, 0), int(entry.rstrip("]")) + 1)
                for kind, messages in storage_faults(files, stored[name], np.dtype(leaves[path].dtype)).items():
                    found[kind] += messages
    for tensor, count in entries.items():
        if files.shape(tensor)[0] != count:
            found["shape"].append(f"{tensor}: {files.shape(tensor)[0]} entries in the file, {count} by the config")
    return {kind: sorted(set(messages)) for kind, messages in found.items()}


def _extra(
    files: TensorFiles, stored: Mapping[str, Stored], names: set[str], beside: tuple[str, ...], ignored: tuple[str, ...]
) -> list[str]:
    """Names of tensors that nothing reads and that should not be there."""
    used = {tensor.partition("[")[0] for s in stored.values() for tensor in s.tensors}
    used |= {name.partition("[")[0] for name in names}
    return sorted(n for n in files if n not in used and not n.startswith(beside) and not n.endswith(ignored))


def _to_quantise(
    directory: Path,
    files: TensorFiles,
    rules_by_leaf: Mapping[str, TargetLeaf],
    stored: Mapping[str, Stored],
    kind: str,
) -> dict[str, Stored]:
    """The matrices that quantising a plain checkpoint concerns, none where it is published that way already."""
    published = {s.form.kind for s in stored.values() if s.form}
    if published - {kind}:
        raise ConfigError(
            f"{directory}: quantization={kind}, but the weights are published as {', '.join(sorted(published))}; "
            "use auto, which keeps them so"
        )
    found: dict[str, Stored] = {}
    for path, leaf in () if published else rules_by_leaf.items():
        folder, _, name = _kind(path).rpartition("/")
        if folder not in FOLDERS or name in NEVER:
            continue
        for rule in leaf.rules.values():
            pack = PACKS[rule.pack]
            for part in (stored[n] for n in rule.hub if n in stored):
                dtype = files.tensors[part.data.partition("[")[0]].dtype
                if len(part.shape) == 2 and pack.axes is not None and dtype in PLAIN:
                    found[part.name] = replace(part, form=_own_form(kind, part.shape, pack.inner), fresh=True)
    return found


def _own_form(kind: str, shape: tuple[int, ...], inner: int) -> Format:
    """Blocks for fp8, one scale per output for int8."""
    if kind == "fp8":
        return Format("fp8", FP8_BLOCK)
    return Format("int8", (1, shape[1]) if inner == 1 else (shape[0], 1))


def _formats(rules_by_leaf: Mapping[str, TargetLeaf], stored: Mapping[str, Stored]) -> dict[str, Format]:
    """Formats of the kinds of parameters all of whose tensors are quantised alike."""
    found: dict[str, set[Format | None]] = {}
    for path, leaf in rules_by_leaf.items():
        for rule in leaf.rules.values():
            found.setdefault(_kind(path), set()).add(_format(rule, leaf.part, stored))
    return {kind: one for kind, forms in found.items() if len(forms) == 1 and (one := next(iter(forms))) is not None}


def _format(rule: Rule, part: tuple[int, ...], stored: Mapping[str, Stored]) -> Format | None:
    """Format of the part of a parameter that a rule fills, None if it cannot be kept quantised."""
    forms = {stored[name].form if name in stored else None for name in rule.hub}
    form = next(iter(forms))
    if len(forms) > 1 or form is None:
        return None
    pack = PACKS[rule.pack]
    blocks = pack.blocks(part, (form.blocks[0], form.blocks[1]))
    if blocks is None or pack.axes is None:
        return None
    if form.kind != "fp4":
        return replace(form, blocks=blocks)
    packed = len(pack.axes) - 1 - pack.axes[::-1].index(2 + form.packed_axis)
    return replace(form, blocks=blocks, packed_axis=packed - len(part))


def scale_steps(pack: str, leaf: Format, published: Format) -> tuple[int, int]:
    """How many blocks of a parameter lie in a published one, along each axis of the matrix."""
    axes = PACKS[pack].axes
    assert axes is not None, "only matrices are quantised"
    last = [len(axes) - 1 - axes[::-1].index(axis) for axis in (0, 1)]
    return published.blocks[0] // leaf.blocks[last[0]], published.blocks[1] // leaf.blocks[last[1]]
