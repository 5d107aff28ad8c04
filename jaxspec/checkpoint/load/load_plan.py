"""A plan of loading: which parameter each tensor of a directory feeds, what stays quantized, and what is wrong."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files.stream import TensorFiles, TensorName
from jaxspec.checkpoint.gguf.gguf_tensors import open_tensors
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
from jaxspec.checkpoint.names.table import NameRule, Unread
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.nn.param import kind_of
from pallas_kernels.quantized import Format, abstract_quantized

QUANTIZATIONS = ("auto", "none", "fp8", "int8")
WORDS = {"missing": "missing", "extra": "not known", "shape": "of the wrong shape", "dtype": "of the wrong dtype"}

# Whose matrices quantization=fp8 and int8 quantize, and what they quantize besides of a head.
FOLDERS = ("attention", "ffn", "ffn/shared", "first/attention", "first/ffn", "first/ffn/shared")
OF_HEADS = ("fc_XD", "first/join_XD", "head_DW")
NEVER = ("router_DE", "shared_gate_D1", "table_VA")


@dataclass(frozen=True)
class LoadPlan:
    """A plan of loading one network.

    Attributes:
      directory: the checkpoint.
      net: the network; its policy has the formats of what stays quantized.
      files: the checkpoint's tensors.
      leaves: every parameter by path: shape and dtype, or a ``Quantized`` of such.
      rules_by_leaf: the rules of each.
      stored: how each tensor of the rules is stored, missing ones left out.
      computed: parameters that no tensor fills, by path.
      problems: what is wrong, by the keys of ``WORDS``.
    """

    directory: Path
    net: Any
    files: TensorFiles
    leaves: Mapping[str, Any]
    rules_by_leaf: Mapping[str, TargetLeaf]
    stored: Mapping[TensorName, Stored]
    computed: Mapping[str, np.ndarray]
    problems: dict[str, list[str]]

    def check(self) -> None:
        """Lets only sound checkpoints pass.

        Raises:
          CheckpointError: names every missing, extra and misshaped tensor at once.
        """
        text = [f"{len(p)} {WORDS[kind]}: " + ", ".join(p) for kind, p in self.problems.items() if p]
        if text:
            raise CheckpointError(f"{self.directory}: tensors do not match config.json; " + "; ".join(text))

    def kinds(self) -> dict[str, Format | None]:
        """Returns the format of each kind of parameter, None for plain ones."""
        return {_kind(path): self.net.policy.storage.format_of(_kind(path)) for path in self.leaves}


def make_plan(
    directory: Path,
    net: Any,
    rules: Iterable[NameRule],
    *,
    unread: Unread | None = None,
    block: tuple[int, int] = FP8_BLOCK,
    quantization: str = "auto",
    files: TensorFiles | None = None,
    slots_by_layer: Mapping[str, ExpertSlots] = NO_SLOTS,
) -> LoadPlan:
    """Compares a network with the tensors of a directory; only their headers are read.

    Args:
      directory: the checkpoint.
      net: network with ``policy`` and ``initial``, and ``arch`` where layers may lie in stacks.
      rules: of a name table.
      unread: published names that are not loaded; None if it does not matter what else there is.
      block: numbers per scale of fp8 weights.
      quantization: ``auto`` keeps what is published quantized, ``none`` widens it, ``fp8`` and ``int8`` quantize the
        matrices of attention and feed-forward layers.
      files: the directory's tensors, where they are known already or only promised.
      slots_by_layer: slots of experts, see ``resolve_rules``.

    Raises:
      ConfigError: the quantization is not known, or the checkpoint already has another.
      CheckpointError: files are unreadable, or quantized in a way that is not supported.
    """
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization {quantization!r} is not known; known are {', '.join(QUANTIZATIONS)}")
    files = open_tensors(directory) if files is None else files
    arch = getattr(net, "arch", None)
    leaves = flatten(abstract_params(net.clone(policy=net.policy.update(formats=()))))
    rules_by_leaf = resolve_rules(rules, leaves, arch, slots_by_layer)
    computed = tables(slots_by_layer, leaves, arch)
    unnamed = [path for path, leaf in rules_by_leaf.items() if len(leaf.rules) != math.prod(leaf.shape[: leaf.lead])]
    unnamed += [path for path in leaves if path not in rules_by_leaf and path not in computed]
    assert not unnamed, f"parameters that no rule of the name table fills: {unnamed}"
    names = {name for leaf in rules_by_leaf.values() for rule in leaf.rules.values() for name in rule.names}
    stored = {name: storage for name in names if (storage := storage_of(files, name, block))}
    problems = _mismatches(files, rules_by_leaf, leaves, stored)
    if unread is not None:
        known = {name.whole for s in stored.values() for name in s.tensors} | {name.whole for name in names}
        extra = sorted(name for name in files if name not in known and not unread.covers(name))
        if scheme := other_scheme(extra):
            raise CheckpointError(f"{directory}: its weights are {scheme}, which is not supported; {SUPPORTED}")
        problems["extra"] = extra
    if quantization in ("fp8", "int8"):
        stored |= _to_quantize(directory, files, rules_by_leaf, stored, quantization)
    formats = {} if quantization == "none" else _formats(rules_by_leaf, stored)
    for path, leaf in leaves.items():
        if _kind(path) in formats:
            leaves[path] = abstract_quantized(leaf.shape, formats[_kind(path)])
    net = net.clone(policy=net.policy.update(formats=tuple(sorted(formats.items()))))
    return LoadPlan(directory, net, files, leaves, rules_by_leaf, stored, computed, problems)


def _kind(path: str) -> str:
    return kind_of(path.split("/"))


def _mismatches(
    files: TensorFiles,
    rules_by_leaf: Mapping[str, TargetLeaf],
    leaves: Mapping[str, Any],
    stored: Mapping[TensorName, Stored],
) -> dict[str, list[str]]:
    """Names tensors that are missing, of the wrong shape or of the wrong dtype, by the keys of ``WORDS``."""
    problems: dict[str, list[str]] = {"missing": [], "extra": [], "shape": [], "dtype": []}
    entries: dict[str, int] = {}  # the tables' entries of each tensor's first axis
    for path, leaf in rules_by_leaf.items():
        for rule in leaf.rules.values():
            for name, shape in zip(rule.names, hub_shapes(leaf, rule), strict=True):
                if name not in stored:
                    problems["missing"].append(name.whole)
                    continue
                data = stored[name].data
                if stored[name].shape != shape:
                    problems["shape"].append(f"{name}: {stored[name].shape} in the file, {shape} by the config")
                if data.entry is not None:
                    entries[data.whole] = max(entries.get(data.whole, 0), data.entry + 1)
                for kind, messages in storage_faults(files, stored[name], np.dtype(leaves[path].dtype)).items():
                    problems[kind] += messages
    for tensor, count in entries.items():
        there = files.tensors[tensor].shape[0]
        if there != count:
            problems["shape"].append(f"{tensor}: {there} entries in the file, {count} by the config")
    return {kind: sorted(set(messages)) for kind, messages in problems.items()}


def _to_quantize(
    directory: Path,
    files: TensorFiles,
    rules_by_leaf: Mapping[str, TargetLeaf],
    stored: Mapping[TensorName, Stored],
    kind: str,
) -> dict[TensorName, Stored]:
    """Returns the matrices of a plain checkpoint to quantize, none where it is published that way already."""
    published = {s.form.kind for s in stored.values() if s.form}
    if published - {kind}:
        raise ConfigError(
            f"{directory}: quantization={kind}, but the weights are published as {', '.join(sorted(published))}; "
            "use auto, which keeps them so"
        )
    chosen: dict[TensorName, Stored] = {}
    for path, leaf in () if published else rules_by_leaf.items():
        folder, _, name = (own := _kind(path)).rpartition("/")
        if own not in OF_HEADS and (folder not in FOLDERS or name in NEVER):
            continue
        for rule in leaf.rules.values():
            pack = PACKS[rule.pack]
            for part in (stored[n] for n in rule.names if n in stored):
                if len(part.shape) == 2 and pack.axes is not None and files.dtype(part.data) in PLAIN:
                    form = _new_form(kind, part.shape, pack.inner)
                    chosen[part.name] = replace(part, form=form, to_quantize=True)
    return chosen


def _new_form(kind: str, shape: tuple[int, ...], inner: int) -> Format:
    """Blocks for fp8, one scale per output for int8."""
    if kind == "fp8":
        return Format("fp8", FP8_BLOCK)
    return Format("int8", (1, shape[1]) if inner == 1 else (shape[0], 1))


def _formats(rules_by_leaf: Mapping[str, TargetLeaf], stored: Mapping[TensorName, Stored]) -> dict[str, Format]:
    """Returns the formats of the kinds of parameters all of whose tensors are quantized alike."""
    forms: dict[str, set[Format | None]] = {}
    for path, leaf in rules_by_leaf.items():
        for rule in leaf.rules.values():
            forms.setdefault(_kind(path), set()).add(_format(rule, leaf.part, stored))
    return {kind: form for kind, (form, *others) in forms.items() if form is not None and not others}


def _format(rule: NameRule, part: tuple[int, ...], stored: Mapping[TensorName, Stored]) -> Format | None:
    """Returns the format of the part of a parameter that a rule fills, None if it cannot be kept quantized."""
    form, *others = {stored[name].form if name in stored else None for name in rule.names}
    pack = PACKS[rule.pack]
    if others or form is None or pack.axes is None:
        return None
    blocks = pack.blocks(part, (form.blocks[0], form.blocks[1]))
    if blocks is None or form.kind != "fp4":
        return None if blocks is None else replace(form, blocks=blocks)
    # Two fp4 numbers share a byte along the innermost of the parameter's axes that the matrix axis is cut into.
    packed = len(pack.axes) - 1 - pack.axes[::-1].index(2 + form.packed_axis)
    return replace(form, blocks=blocks, packed_axis=packed - len(part))


def scale_steps(pack: str, leaf: Format, published: Format) -> tuple[int, int]:
    """Returns how many blocks of a parameter lie in a published one, along each axis of the matrix."""
    axes = PACKS[pack].axes
    assert axes is not None, "only matrices are quantized"
    last = [len(axes) - 1 - axes[::-1].index(axis) for axis in (0, 1)]
    return published.blocks[0] // leaf.blocks[last[0]], published.blocks[1] // leaf.blocks[last[1]]
