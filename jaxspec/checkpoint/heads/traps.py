"""Traps of draft heads, ten of the EAGLE family: what vLLM and SGLang would read differently in the very same files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.heads.block_config import METHODS
from jaxspec.checkpoint.heads.block_traps import BlockOfTarget, look_at_block
from jaxspec.checkpoint.heads.deepseek_stages import is_staged
from jaxspec.checkpoint.heads.directory import ids_of, plan_head
from jaxspec.checkpoint.heads.findings import (
    EXPORT,
    SAME,
    Finding,
    error,
    look_at_rotation,
    look_at_vocabulary,
    ok,
    warning,
)
from jaxspec.checkpoint.heads.identify import (
    TAPS,
    AnySpec,
    HeadFormat,
    default_taps,
    head_format,
    is_prediction,
    spec_of,
    stated_taps,
    taps_of,
)
from jaxspec.checkpoint.heads.tensors import HeadFiles, layers_in
from jaxspec.checkpoint.load.model import read_config
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockSpec
from jaxspec.models.catalog import arch_of
from jaxspec.nn.policy import make_policy

AS_WRITTEN = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite")
AS_WRITTEN_TO_THE_TOP = ("gpt_oss",)  # where the last block is among them


@dataclass(frozen=True)
class HeadOfTarget:
    """A head and its target.

    Attributes:
      config, files, kind: of the head.
      spec: what head it is; None if that cannot be told.
      fault: why not.
      target, directory: of the model that it drafts for.
    """

    config: Mapping[str, Any]
    files: HeadFiles
    kind: HeadFormat
    spec: AnySpec | None
    fault: str
    target: ArchSpec
    directory: Path

    @property
    def eagle(self) -> Mapping[str, Any]:
        """The part of the config that SGLang reads."""
        return self.config.get("eagle_config") or {}

    @property
    def layers(self) -> Mapping[str, Any]:
        """The config of its layers."""
        return self.config.get("transformer_layer_config") or self.config

    @property
    def taps(self) -> tuple[int, ...] | None:
        """The boundaries that it was made for, None if the config contradicts itself."""
        try:
            return taps_of(self.config, self.target)
        except ConfigError:
            return None

    @property
    def has_taps(self) -> bool:
        """Whether other engines give it residual streams at layer boundaries."""
        return self.kind in ("eagle3", "speculators") and bool(self.eagle.get("use_aux_hidden_state", True))


def check_head(directory: Path, target: Path) -> tuple[tuple[Finding, ...], str]:
    """Looks for every trap; also returns why jaxspec refuses the head, empty if it does not.

    Raises:
      ConfigError: a config is missing, or the head's format is not known.
      CheckpointError: files are unreadable.
    """
    config, arch = read_config(directory), arch_of(read_config(target))
    if is_prediction(config):
        return (), _refusal(directory, arch)
    files = HeadFiles(directory)
    kind = head_format(config, tuple(files))
    if is_staged(files):  # engines take them from the target's own files, and nothing can be said in two ways
        return (), _refusal(directory, arch)
    try:
        spec, fault = spec_of(config, files, arch), ""
    except ConfigError as wrong:
        spec, fault = None, str(wrong)
    if kind == "block" or isinstance(spec, BlockSpec) or config.get("speculators_model_type") in METHODS:
        block = BlockOfTarget(config, files, kind, spec, fault, arch, target, directory)
        return look_at_block(block), fault or _refusal(directory, arch)
    head = HeadOfTarget(config, files, kind, spec, fault, arch, target)
    findings = tuple(replace(look(head), trap=f"T{n}") for n, look in enumerate(LOOKS, start=1))
    return findings, fault or _refusal(directory, arch)


def _refusal(directory: Path, target: ArchSpec) -> str:
    try:
        plan = plan_head(directory, target, make_policy(np.float32))
        plan.check()
        ids_of(plan)
    except (ConfigError, CheckpointError) as wrong:
        return str(wrong)
    return ""


def vllm_taps(head: HeadOfTarget) -> tuple[int, ...]:
    """Returns the boundaries that vLLM taps: those at the top of the config, as they are."""
    return stated_taps(head.config)[0] or default_taps(head.target)


def sglang_taps(head: HeadOfTarget) -> tuple[int, ...]:
    """Returns the boundaries that SGLang taps: those in ``eagle_config`` plus one, with exceptions for some models."""
    nested = stated_taps(head.config)[1]
    if nested is None:
        return default_taps(head.target)
    family = head.target.family
    as_written = (family in AS_WRITTEN and nested[0] != 1) or (
        family in AS_WRITTEN_TO_THE_TOP and max(nested) == len(head.target.layers)
    )
    return nested if as_written else tuple(o + 1 for o in nested)


Look = Callable[[HeadOfTarget], Finding]
LOOKS: list[Look] = []


def _titled(title: str, look: Look, *, of_taps: bool = False) -> Look:
    def titled(head: HeadOfTarget) -> Finding:
        clear = ok("nothing here that engines would read differently")
        return replace(clear if of_taps and not head.has_taps else look(head), title=title)

    return titled


def _trap(title: str, *, of_taps: bool = False) -> Callable[[Look], Look]:
    """Registers a look for one trap; one ``of_taps`` does not concern heads without them."""

    def register(look: Look) -> Look:
        LOOKS.append(_titled(title, look, of_taps=of_taps))
        return look

    return register


@_trap("which layers are tapped", of_taps=True)
def _conventions(head: HeadOfTarget) -> Finding:
    taps, (top, nested), depth = head.taps, stated_taps(head.config), len(head.target.layers)
    words = f"boundaries {_list(top)} at the top, block outputs {_list(nested)} in eagle_config"
    vllm, sglang = f"taps boundaries {list(vllm_taps(head))}", f"taps boundaries {list(sglang_taps(head))}"
    cure = f"write the boundaries b at the top as {TAPS}, and b - 1 in eagle_config"
    if taps is None:
        return error(f"{words}: they contradict each other", vllm, sglang, cure)
    if list(taps) != sorted({b for b in taps if 0 <= b <= depth}):
        words = f"boundaries {list(taps)} do not ascend within 0 to {depth}, the target's"
        return error(words, vllm, sglang, f"use the head's own target; {cure}")
    return ok(f"{words}: boundaries {list(taps)}", vllm, sglang)


@_trap("where the tap ids stand", of_taps=True)
def _where(head: HeadOfTarget) -> Finding:
    top, nested = stated_taps(head.config)
    guess = f", finds nothing and takes {list(default_taps(head.target))}"
    vllm, sglang = f"reads the top{'' if top else guess}", f"reads eagle_config{'' if nested else guess}"
    if head.kind == "speculators":
        sglang = "cannot read this format at all"
        if top and len(top) != 3:
            words = f"{len(top)} taps; vLLM builds the product of this format for 3"
            return warning(words, "fails", sglang, EXPORT)
    lacking = [where for where, ids in (("at the top", top), ("in eagle_config", nested)) if ids is None]
    if not lacking:
        return ok("at the top and in eagle_config", vllm, sglang)
    words = f"no ids {' and none '.join(lacking)}"
    if len(lacking) == 2:
        return warning(f"{words}; what it was trained with is a guess", vllm, sglang, EXPORT)
    taps = head.taps
    if taps is None or taps != vllm_taps(head) or (taps != sglang_taps(head) and head.kind != "speculators"):
        return warning(words, vllm, sglang, EXPORT)
    return ok(words, vllm, sglang)


@_trap("SGLang's exceptions by model", of_taps=True)
def _exceptions(head: HeadOfTarget) -> Finding:
    made_for, family = head.taps, head.target.family
    if made_for is None:
        return ok("nothing here that engines would read differently")
    taps = sglang_taps(head)
    if stated_taps(head.config)[1] is None or taps == made_for:
        return ok(f"none applies to {family} with these ids")
    cure = f"for {family} choose taps whose first boundary is 2" if family in AS_WRITTEN else EXPORT
    return warning(f"made for boundaries {list(made_for)}", sglang=f"taps {list(taps)}", cure=cure)


@_trap("norm_before_residual", of_taps=True)
def _residual(head: HeadOfTarget) -> Finding:
    stated = head.config.get("norm_before_residual")
    if stated is None and head.kind == "speculators":
        vllm = f"takes {'false' if head.config.get('speculators_model_type') == 'peagle' else 'true'}"
        cure = "write down what it was trained with; speculators takes false"
        return error("not stated", vllm, "cannot read this format", cure)
    if stated:
        cure = "serve it with jaxspec or vLLM, or train with false"
        return warning("true", "adds to the normed feature", "ignores it, adds to the bare", cure)
    return ok("not stated, false everywhere" if stated is None else "false")


@_trap("norm_output: which stream the next draft continues from", of_taps=True)
def _recycled(head: HeadOfTarget) -> Finding:
    stated = head.config.get("norm_output")
    if head.kind == "eagle3" and stated:
        words, after = "true; SpecForge trains such heads on the stream before the norm", "continues after the norm"
        return warning(words, after, after, "if SpecForge trained it, take norm_output out of config.json")
    if head.kind == "eagle3" and stated is False:
        cure = "take norm_output out of config.json: unstated it means the same everywhere"
        return warning("false; SpecForge then leaves out the last norm", cure=cure)
    return ok("not stated, false everywhere" if stated is None else str(stated).lower())


@_trap("norms of the layers after the first")
def _later_norms(head: HeadOfTarget) -> Finding:
    depth = layers_in(head.files)
    if not head.has_taps or depth < 2:
        return ok("there is one layer")
    last = f"layers.{depth - 1}."
    names = [
        name
        for name in ("input_layernorm", "hidden_norm")
        if any(given.endswith(f"{last}{name}.weight") for given in head.files.given)
    ]
    vllm, sglang = (
        SAME if name in names else f"leaves {name} at its initial value" for name in ("input_layernorm", "hidden_norm")
    )
    if head.kind == "speculators":
        sglang = "cannot read this format"
    words = f"{last}{' and '.join(names)}"
    if vllm != SAME or (head.kind == "eagle3" and sglang != SAME):
        return warning(words, vllm, sglang, EXPORT)
    return ok(words, vllm, sglang)


@_trap("the embedding")
def _embedding(head: HeadOfTarget) -> Finding:
    if "embed_tokens.weight" not in head.files:
        return ok("the target's")
    embed_VD = head.files["embed_tokens.weight"]
    total, dim = head.target.vocab_size, head.target.model_dim
    if embed_VD.shape[0] != total:
        words = f"{embed_VD.shape[0]} rows, but the target has {total} tokens"
        return error(words, "fails or reads wrong rows", "replaces it", "use the head's own target")
    if embed_VD.shape[1] != dim:
        return ok(f"its own, of width {embed_VD.shape[1]}")
    target_VD = _target_embedding(head)
    if target_VD is None:
        return warning("its own; the target's files are not there to compare", sglang="replaces it")
    if np.array_equal(embed_VD, target_VD.astype(embed_VD.dtype)):
        return ok("a copy of the target's")
    cure = "serve it with jaxspec or vLLM, or train with the target's embedding"
    return warning("its own, not the target's", "keeps it", "replaces it by the target's", cure)


def _target_embedding(head: HeadOfTarget) -> np.ndarray | None:
    (name,) = known_tables()[head.target.family].hub_names("embed_VD")
    try:
        return TensorFiles.of(head.directory).get(name)
    except CheckpointError:
        return None


LOOKS.append(_titled("d2t, the draft vocabulary", look_at_vocabulary))


@_trap("fc.bias")
def _bias(head: HeadOfTarget) -> Finding:
    stated, there = head.config.get("bias"), "fc.bias" in head.files
    if stated and not there:
        cure = "write bias false, or add the tensor"
        return error("config.json says bias, the files have none", "ignores it", "has one", cure)
    if head.kind == "eagle1" and not there and stated is None:
        words = "none, and config.json does not say so; SafeAILab takes bias for true"
        return warning(words, cure="write bias false")
    if there:
        return warning("there", "has no place for it", "adds it", "serve it with jaxspec or SGLang")
    return ok("none")


LOOKS.append(_titled("rotary positions", look_at_rotation))


def _list(ids: tuple[int, ...] | None) -> str:
    return "none" if ids is None else str(list(ids))
