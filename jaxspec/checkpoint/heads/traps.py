"""What vLLM and SGLang would make of a draft head's very files: the ten ways to an acceptance length of 1."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.heads.directory import plan_head, vocabulary
from jaxspec.checkpoint.heads.identify import TAPS, HeadFormat, default_taps, head_format, spec_of, stated_taps, taps_of
from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.checkpoint.heads.tensors import HeadFiles, layers_in
from jaxspec.checkpoint.load.model import read_config
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import HeadSpec
from jaxspec.models.medusa import MedusaSpec
from jaxspec.nn.policy import make_policy

Verdict = Literal["ok", "warning", "error"]
AS_WRITTEN = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite")
AS_WRITTEN_TO_THE_TOP = ("gpt_oss",)  # where the last block is among them
EXPORT = "jaxspec export --format eagle3 writes it for both"
SAME = "the same as jaxspec"


@dataclass(frozen=True)
class Finding:
    """What was found about one trap.

    Attributes:
      trap: ``T1`` to ``T10``.
      title: what it is about.
      verdict: ``error`` where the head is wrong or ambiguous for everybody, ``warning`` where an engine would compute
        something else than it was made for.
      found: in these files.
      vllm, sglang: what those engines do with them.
      cure: what to do, empty where all is well.
    """

    trap: str
    title: str
    verdict: Verdict
    found: str
    vllm: str = SAME
    sglang: str = SAME
    cure: str = ""


@dataclass(frozen=True)
class Case:
    """A head and its target.

    Attributes:
      config, files, kind: of the head.
      spec: what head it is; None where that cannot be told.
      fault: why not.
      target, directory: of the model that it drafts for.
    """

    config: Mapping[str, Any]
    files: HeadFiles
    kind: HeadFormat
    spec: HeadSpec | MedusaSpec | None
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
        """The boundaries that it was made for, None where the config contradicts itself."""
        try:
            return taps_of(self.config, self.target)
        except ConfigError:
            return None

    @property
    def has_taps(self) -> bool:
        """Whether it reads residual streams at layer boundaries, as far as other engines are concerned."""
        return self.kind in ("eagle3", "speculators") and bool(self.eagle.get("use_aux_hidden_state", True))


def check_head(directory: Path, target: Path) -> tuple[tuple[Finding, ...], str]:
    """All findings about a head, and why jaxspec refuses it, empty if it does not.

    Args:
      directory: of the head.
      target: directory of the model that it drafts for.

    Raises:
      ConfigError: a config is missing, or the head's format is not known.
      CheckpointError: files are unreadable.
    """
    config, files, arch = read_config(directory), HeadFiles(directory), arch_of(read_config(target))
    kind = head_format(config, tuple(files))
    try:
        spec, fault = spec_of(config, files, arch), ""
    except ConfigError as error:
        spec, fault = None, str(error)
    case = Case(config, files, kind, spec, fault, arch, target)
    found = tuple(replace(look(case), trap=f"T{n}") for n, look in enumerate(LOOKS, start=1))
    return found, fault or _refusal(directory, arch)


def _refusal(directory: Path, target: ArchSpec) -> str:
    kind = np.dtype(np.float32)
    try:
        plan = plan_head(directory, target, make_policy(kind))
        plan.check()
        assert isinstance(plan.files, HeadFiles)
        vocabulary(plan.files, plan.net.spec)
    except (ConfigError, CheckpointError) as error:
        return str(error)
    return ""


def vllm_taps(case: Case) -> tuple[int, ...]:
    """The boundaries that vLLM taps: those at the top of the config, as they are."""
    return stated_taps(case.config)[0] or default_taps(case.target)


def sglang_taps(case: Case) -> tuple[int, ...]:
    """The boundaries that SGLang taps: those in ``eagle_config`` plus one, with exceptions for some models."""
    nested = stated_taps(case.config)[1]
    if nested is None:
        return default_taps(case.target)
    family = case.target.family
    as_written = (family in AS_WRITTEN and nested[0] != 1) or (
        family in AS_WRITTEN_TO_THE_TOP and max(nested) == len(case.target.layers)
    )
    return nested if as_written else tuple(o + 1 for o in nested)


def _plain(title: str) -> Finding:
    return Finding("", title, "ok", "nothing here that engines would read differently")


def _conventions(case: Case) -> Finding:
    title = "which layers are tapped"
    if not case.has_taps:
        return _plain(title)
    own, (top, nested), depth = case.taps, stated_taps(case.config), len(case.target.layers)
    found = f"boundaries {_list(top)} at the top, block outputs {_list(nested)} in eagle_config"
    vllm, sglang = f"taps boundaries {list(vllm_taps(case))}", f"taps boundaries {list(sglang_taps(case))}"
    cure = f"write the boundaries b at the top as {TAPS}, and b - 1 in eagle_config"
    if own is None:
        return Finding("", title, "error", f"{found}: they contradict each other", vllm, sglang, cure)
    if list(own) != sorted({b for b in own if 0 <= b <= depth}):
        found = f"boundaries {list(own)} do not ascend within 0 to {depth}, the target's"
        return Finding("", title, "error", found, vllm, sglang, f"use the head's own target; {cure}")
    return Finding("", title, "ok", f"{found}: boundaries {list(own)}", vllm, sglang)


def _places(case: Case) -> Finding:
    title = "where the tap ids stand"
    if not case.has_taps:
        return _plain(title)
    top, nested = stated_taps(case.config)
    lacking = [where for where, ids in (("at the top", top), ("in eagle_config", nested)) if ids is None]
    vllm = f"reads the top{'' if top else f', finds nothing and takes {list(default_taps(case.target))}'}"
    sglang = f"reads eagle_config{'' if nested else f', finds nothing and takes {list(default_taps(case.target))}'}"
    if case.kind == "speculators":
        sglang = "cannot read this format at all"
        if top and len(top) != 3:
            found = f"{len(top)} taps; vLLM builds the product of this format for 3"
            return Finding("", title, "warning", found, "fails", sglang, EXPORT)
    if not lacking:
        return Finding("", title, "ok", "at the top and in eagle_config", vllm, sglang)
    own = case.taps
    wrong = own is None or own != vllm_taps(case) or (own != sglang_taps(case) and case.kind != "speculators")
    guessed = len(lacking) == 2
    found = f"no ids {' and none '.join(lacking)}" + ("; what it was trained with is a guess" if guessed else "")
    verdict: Verdict = "warning" if wrong or guessed else "ok"
    return Finding("", title, verdict, found, vllm, sglang, EXPORT if verdict == "warning" else "")


def _exceptions(case: Case) -> Finding:
    title = "SGLang's exceptions by model"
    own, family = case.taps, case.target.family
    if not case.has_taps or own is None:
        return _plain(title)
    taps = sglang_taps(case)
    if stated_taps(case.config)[1] is None or taps == own:
        return Finding("", title, "ok", f"none applies to {family} with these ids")
    cure = f"for {family} choose taps whose first boundary is 2" if family in AS_WRITTEN else EXPORT
    return Finding("", title, "warning", f"made for boundaries {list(own)}", SAME, f"taps {list(taps)}", cure)


def _residual(case: Case) -> Finding:
    title = "norm_before_residual"
    if not case.has_taps:
        return _plain(title)
    stated = case.config.get(title)
    if stated is None and case.kind == "speculators":
        vllm = f"takes {'false' if case.config.get('speculators_model_type') == 'peagle' else 'true'}"
        cure = "write down what it was trained with; speculators takes false"
        return Finding("", title, "error", "not stated", vllm, "cannot read this format", cure)
    if stated:
        cure = "serve it with jaxspec or vLLM, or train with false"
        return Finding("", title, "warning", "true", "adds to the normed feature", "ignores it, adds to the bare", cure)
    return Finding("", title, "ok", "not stated, false everywhere" if stated is None else "false")


def _recycled(case: Case) -> Finding:
    title = "norm_output: which stream the next draft continues from"
    if not case.has_taps:
        return _plain(title)
    stated, raw = case.config.get("norm_output"), case.kind == "eagle3"
    if raw and stated:
        return Finding(
            "", title, "warning", "true; SpecForge trains such heads on the stream before the norm",
            "continues behind the norm", "continues behind the norm",
            "if SpecForge trained it, take norm_output out of config.json",
        )  # fmt: skip
    if raw and stated is False:
        cure = "take norm_output out of config.json: unstated it means the same everywhere"
        return Finding("", title, "warning", "false; SpecForge then leaves out the last norm", cure=cure)
    return Finding("", title, "ok", "not stated, false everywhere" if stated is None else str(stated).lower())


def _later_norms(case: Case) -> Finding:
    title = "norms of the layers behind the first"
    if not case.has_taps or layers_in(case.files) < 2:
        return Finding("", title, "ok", "there is one layer")
    given = set(case.files.given)
    last = f"layers.{layers_in(case.files) - 1}."
    have = {name: any(n.endswith(f"{last}{name}.weight") for n in given) for name in ("input_layernorm", "hidden_norm")}
    found = f"{last}{' and '.join(name for name, there in have.items() if there)}"
    vllm = SAME if have["input_layernorm"] else "leaves input_layernorm at its initial value"
    sglang = SAME if have["hidden_norm"] else "leaves hidden_norm at its initial value"
    if case.kind == "speculators":
        sglang = "cannot read this format"
    wrong = vllm != SAME or (case.kind == "eagle3" and sglang != SAME)
    return Finding("", title, "warning" if wrong else "ok", found, vllm, sglang, EXPORT if wrong else "")


def _embedding(case: Case) -> Finding:
    title = "the embedding"
    if "embed_tokens.weight" not in case.files:
        return Finding("", title, "ok", "the target's")
    own = case.files["embed_tokens.weight"]
    total, dim = case.target.vocab_size, case.target.model_dim
    if own.shape[0] != total:
        found = f"{own.shape[0]} rows, but the target has {total} tokens"
        cure = "use the head's own target"
        return Finding("", title, "error", found, "fails or reads wrong rows", "replaces it", cure)
    if own.shape[1] != dim:
        return Finding("", title, "ok", f"its own, of width {own.shape[1]}")
    theirs = _target_embedding(case)
    if theirs is None:
        found = "its own; the target's files are not there to compare"
        return Finding("", title, "warning", found, sglang="replaces it")
    if np.array_equal(own, theirs.astype(own.dtype)):
        return Finding("", title, "ok", "a copy of the target's")
    cure = "serve it with jaxspec or vLLM, or train with the target's embedding"
    return Finding("", title, "warning", "its own, not the target's", "keeps it", "replaces it by the target's", cure)


def _target_embedding(case: Case) -> np.ndarray | None:
    name = next(r.hub[0] for r in known_tables()[case.target.family].top if r.leaf == "embed_VD")
    try:
        files = TensorFiles.of(case.directory)
        return files.get(name)
    except CheckpointError:
        return None


def _vocabulary(case: Case) -> Finding:
    title = "d2t, the draft vocabulary"
    if case.spec is None:
        return Finding("", title, "ok", "not looked at, the head does not fit its target")
    try:
        ids_W = vocabulary(case.files, case.spec)
    except CheckpointError as error:
        engines = "would take it as it is, and accept nothing"
        return Finding("", title, "error", str(error), engines, engines, "export the head again, or correct d2t")
    if ids_W is None:
        return Finding("", title, "ok", f"all {case.target.vocab_size} tokens")
    return Finding("", title, "ok", f"{len(ids_W)} of {case.target.vocab_size} tokens, offsets, ascending")


def _bias(case: Case) -> Finding:
    title = "fc.bias"
    stated, there = case.config.get("bias"), "fc.bias" in case.files
    if stated and not there:
        cure = "write bias false, or add the tensor"
        return Finding("", title, "error", "config.json says bias, the files have none", "ignores it", "has one", cure)
    if case.kind == "eagle1" and not there and stated is None:
        found = "none, and config.json does not say so; SafeAILab takes bias for true"
        return Finding("", title, "warning", found, cure="write bias false")
    if there:
        cure = "serve it with jaxspec or SGLang"
        return Finding("", title, "warning", "there", "has no place for it", "adds it", cure)
    return Finding("", title, "ok", "none")


def _rotation(case: Case) -> Finding:
    title = "rotary positions"
    own, theirs = _rope(case.layers), getattr(case.target.layers[0].attention, "rope", None)
    if case.kind == "medusa" or own is None:
        return Finding("", title, "ok", "none" if case.kind == "medusa" else "not read")
    words = f"base {own.theta:g}, {own.scaling.kind if own.scaling else 'plain'}"
    if "rope_theta" not in case.layers and "rope_theta" not in (case.layers.get("rope_parameters") or {}):
        found, cure = f"not stated, so {words}", "write down the base that it was trained with"
        return Finding("", title, "warning", found, cure=cure)
    if own.scaling and own.scaling.kind == "yarn" and not (theirs and theirs.scaling):
        found = f"{words}, the target plain; ModelOpt trains plainly and adds yarn when it exports"
        return Finding("", title, "warning", found, cure="if it was trained plainly, take rope_scaling out")
    if theirs is not None and theirs.scaling and own.scaling is None:
        found = f"{words}, the target {theirs.scaling.kind}; it has not seen positions beyond its training's"
        return Finding("", title, "warning", found, cure="measure acceptance on long texts before serving them")
    return Finding("", title, "ok", words)


def _rope(layers: Mapping[str, Any]) -> Any:
    try:
        return getattr(layers_of(layers).layers[0].attention, "rope", None)
    except ConfigError:
        return None


def _list(ids: tuple[int, ...] | None) -> str:
    return "none" if ids is None else str(list(ids))


LOOKS: tuple[Callable[[Case], Finding], ...] = (
    _conventions, _places, _exceptions, _residual, _recycled, _later_norms, _embedding, _vocabulary, _bias, _rotation,
)  # fmt: skip
