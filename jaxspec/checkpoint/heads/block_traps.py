"""Traps of heads that draft blocks: what is wrong or unsaid in their files, and what engines then take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.heads.block_config import NESTED, BlockConfig
from jaxspec.checkpoint.heads.findings import Finding, error, look_at_rotation, look_at_vocabulary, ok, warning
from jaxspec.checkpoint.heads.identify import AnySpec, HeadFormat
from jaxspec.checkpoint.heads.tensors import HeadFiles
from jaxspec.checkpoint.heads.verifier import trained_for
from jaxspec.checkpoint.load.model import read_config
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockSpec

EXPORT = "jaxspec export --format dflash states it"
NATIVE = "cannot read jaxspec's own format; jaxspec export --format dflash writes theirs"
WIDE = 16  # blocks in a window beyond which its edges matter little


@dataclass(frozen=True)
class BlockOfTarget:
    """A head and its target.

    Attributes:
      config, files, kind, directory: of the head.
      spec: what head it is; None if that cannot be told.
      fault: why not.
      target, model: of the model that it drafts for, its directory the second.
    """

    config: Mapping[str, Any]
    files: HeadFiles
    kind: HeadFormat
    spec: AnySpec | None
    fault: str
    target: ArchSpec
    model: Path
    directory: Path

    @cached_property
    def read(self) -> BlockConfig:
        """The config, as it is read."""
        return BlockConfig(self.config, self.files)

    @property
    def layers(self) -> Mapping[str, Any]:
        """The config of its layers."""
        return self.config.get("transformer_layer_config") or self.config

    @property
    def block(self) -> BlockSpec:
        """Its spec, where that is known."""
        assert isinstance(self.spec, BlockSpec), "looked at only where it is known"
        return self.spec

    @property
    def is_stated(self) -> bool:
        """Whether it is in our own format, which states everything."""
        return self.kind == "native"


def look_at_block(head: BlockOfTarget) -> tuple[Finding, ...]:
    """Looks for every trap; those about what the head is, only where that can be told."""
    findings = []
    for number, (title, look, needs_spec) in LOOKS.items():
        clear = ok("not looked at, the head is refused")
        finding = clear if needs_spec and head.spec is None else look(head)
        findings.append(replace(finding, trap=number, title=title))
    return tuple(findings)


def _taps(head: BlockOfTarget) -> Finding:
    depth = len(head.target.layers)
    if head.is_stated:
        return ok(f"boundaries {list(head.block.reads.taps)}", NATIVE, NATIVE)
    stated = head.read.stated_taps()
    words = "; ".join(f"{key} means the boundaries {list(taps)}" for key, taps in stated.items())
    try:
        taps = head.read.taps(head.target)
    except ConfigError:
        cure = "keep the ids that it was trained with, in target_layer_ids one less than the boundary"
        return error(words, "reads eagle_aux_hidden_state_layer_ids first", "reads dflash_config first", cure)
    width = head.files.tensors["fc.weight"].shape[-1] if "fc.weight" in head.files else 0
    if width != len(taps) * head.target.model_dim:
        words = f"{len(taps)} taps of {head.target.model_dim}, but fc.weight reads {width}"
        return error(words, "fails", "fails", "use the head's own target, and write the ids that it was trained with")
    if any(not 0 <= b <= depth for b in taps):
        return error(f"{words}, beyond the target's {depth} layers", "fails", "fails", "use the head's own target")
    if not stated:
        words = f"none stated; z-lab's rule gives {list(taps)}"
        return warning(words, "takes the rule, or fails", "takes the rule", EXPORT)
    return ok(words)


def _anchor(head: BlockOfTarget) -> Finding:
    spec, read = head.block, head.read
    words = (
        f"{spec.drafts} drafts of {spec.block_size} rows, the anchor's {'drafts' if spec.from_anchor else 'does not'}"
    )
    said = head.is_stated or read.get("sample_from_anchor") is not None or read.get("shift_label") is not None
    if not said:
        stated = read.method is not None and read.is_dspark
        vllm = "takes it for false" if stated else "takes it from the kind of head, as jaxspec does"
        return warning(f"{words}; not stated", vllm, "takes it from the kind of head", EXPORT)
    if spec.from_anchor and not read.is_dspark and not head.is_stated:
        return warning(words, "refuses such heads but DSpark's", "drafts every token one place off", "serve it here")
    return ok(words)


def _causality(head: BlockOfTarget) -> Finding:
    spec, nested = head.block, head.config.get(NESTED) or {}
    slides = tuple(view.window is not None for view in spec.views)
    kinds = ", ".join("before it" if only else "the whole block" for only in spec.causal)
    words = f"rows see {kinds}"
    mixed = len(set(slides)) > 1
    if mixed and "causal" in nested and head.config.get("is_causal") is None:
        sglang = "sees before it where there is a window, and the whole block elsewhere"
        return warning(f"{words}, by {NESTED}.causal for all layers", sglang=sglang, cure="write is_causal")
    if head.read.method is not None and any(slides) and "sliding_window_non_causal" not in head.config:
        words = f"{words}; sliding_window_non_causal is not stated"
        return warning(words, "sees the whole block", "cannot read this format", "state sliding_window_non_causal")
    if head.read.method is not None and mixed and any(spec.causal):
        return warning(words, "may see before it in full layers, too", "cannot read this format", "serve it here")
    return ok(words)


def _window(head: BlockOfTarget) -> Finding:
    spec, c = head.block, head.layers
    windows = [view.window for view in spec.views]
    words = ", ".join("all" if w is None else str(w) for w in windows) + " positions"
    if head.is_stated:
        return ok(words)
    if head.read.get("use_swa") and not c.get("layer_types"):
        return warning(f"{words}, by use_swa", sglang="has no use_swa: all layers see everything", cure=EXPORT)
    if any(windows) and c.get("use_sliding_window") is False:
        words = f"{words}, but use_sliding_window is false"
        return warning(words, "transformers drops the window", "transformers drops the window", "write true")
    if not any(windows) and c.get("use_sliding_window"):
        words = "use_sliding_window without layer_types: all layers see everything here"
        return warning(words, "as max_window_layers says", "as max_window_layers says", "write layer_types")
    narrow = [w for w in windows if w is not None and w < WIDE * spec.block_size]
    if narrow and spec.window_from_anchor:
        words = f"{words}, which end at the anchor as in speculators' training"
        return warning(
            words, "ends them at every row: the last rows see fewer", "cannot read this format", "serve it here"
        )
    return ok(words)


def _mask(head: BlockOfTarget) -> Finding:
    spec, config = head.block, read_config(head.model)
    ends = config.get("eos_token_id")
    ends = set(ends) if isinstance(ends, list) else {ends}
    words = f"token {spec.mask_token}"
    if spec.own_mask:
        sglang = f"writes it into the target's own table: prompts that hold token {spec.mask_token} change"
        return warning(f"{words}, with an embedding of its own", "ignores or refuses it", sglang, "serve it here")
    if spec.mask_token in ends or spec.mask_token == config.get("bos_token_id"):
        words = f"{words}, which begins or ends the target's texts"
        return warning(words, cure="make sure that it was trained so; published heads mask with a token nobody writes")
    return ok(words)


def _scales(head: BlockOfTarget) -> Finding:
    spec = head.block
    parts = {"embeddings": spec.embedding_scale, "logits": spec.output_scale}
    scaled = [f"{name} times {x:g}" for name, x in parts.items() if x != 1]
    scaled += [f"logits within {spec.softcap:g}"] if spec.softcap else []
    if not scaled:
        return ok("none")
    vllm = "ignores them but for DFlash2" if not spec.conv_taps else "the same as jaxspec"
    sglang = "ignores the embeddings'" if spec.embedding_scale != 1 else "the same as jaxspec"
    return warning(", ".join(scaled), vllm, sglang, "serve it here, or with the engine that agrees")


def _lengths(head: BlockOfTarget) -> Finding:
    nested = (head.config.get(NESTED) or {}).get("block_size")
    top, spec = head.config.get("block_size"), head.block
    if nested is not None and top is not None and nested != top:
        words = f"{nested} in {NESTED}, {top} at the top"
        return error(words, "reads the top first in some files", "reads the inner one", "keep that of the training")
    if nested is None and top is None and not head.is_stated:
        return warning(f"not stated, so {spec.block_size}", "takes 8 or 16 by the format", "takes 16", EXPORT)
    return ok(f"{spec.block_size} rows, always run as in training; other engines run as many as they draft")


def _following(head: BlockOfTarget) -> Finding:
    spec = head.block
    if not spec.markov_rank and spec.confidence == "none":
        sglang = "refuses such heads as DSpark, and drafts one place off as DFlash"
        if head.read.is_dspark and spec.from_anchor:
            return warning("none, in a head of DSpark's kind", sglang=sglang, cure="serve it here")
        return ok("none")
    words = f"{spec.markov_kind} of rank {spec.markov_rank}, confidence from {spec.confidence}"
    if spec.markov_rank and spec.markov_kind != "vanilla":
        return warning(words, "has the vanilla one alone, and no place for these tensors", cure="serve it with SGLang")
    if spec.markov_rank and not head.is_stated and head.config.get("markov_rank") is None:
        return warning(f"{words}, stated in {NESTED} alone", "reads markov_rank at the top", cure=EXPORT)
    return ok(words)


def _convolution(head: BlockOfTarget) -> Finding:
    spec = head.block
    if not spec.conv_taps and not spec.selector_rank:
        return ok("none")
    words = f"{spec.conv_taps} rows in groups of {spec.conv_group}, {spec.selector_top_k} candidates"
    if bool(spec.conv_taps) != bool(spec.selector_rank):
        return warning(words, "wants both", "wants both", "serve it here")
    return ok(f"{words}; it begins anew with every block, whose rows must lie together")


def _last_layer(head: BlockOfTarget) -> Finding:
    depth = len(head.target.layers)
    if depth not in head.block.reads.taps:
        return ok("not read")
    words = "read before the final norm; a training by transformers' hidden_states has it after the norm"
    return warning(words, cure="make sure of it, or train without the last layer")


def _quantized(head: BlockOfTarget) -> Finding:
    form = read_config(head.model).get("quantization_config")
    if not isinstance(form, Mapping):
        return ok("the target is not quantized")
    kind = form.get("quant_method", "quantized")
    if trained_for(head.directory):
        return ok(f"the target is {kind}, and training.json says what the head was trained for")
    words = f"the target is {kind}; heads are trained for bfloat16 ones, whose streams differ"
    return warning(words, cure="measure acceptance before serving, or train on from it with head.start for this target")


Look = Callable[[Any], Finding]
LOOKS: dict[str, tuple[str, Look, bool]] = {
    "T11": ("which layers are tapped", _taps, False),
    "T12": ("the anchor", _anchor, True),
    "T13": ("what a row sees of its block", _causality, True),
    "T14": ("windows", _window, True),
    "T16": ("the mask", _mask, True),
    "T17": ("scales of embeddings and logits", _scales, True),
    "T18": ("d2t, the draft vocabulary", look_at_vocabulary, True),
    "T19": ("rotary positions", look_at_rotation, True),
    "T20": ("the block", _lengths, True),
    "T24": ("the Markov and confidence heads", _following, True),
    "T29": ("convolutions and candidates", _convolution, True),
    "T31": ("the last layer", _last_layer, True),
    "T35": ("a quantized target", _quantized, False),
}
