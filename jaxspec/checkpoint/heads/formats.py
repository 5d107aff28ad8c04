"""Export formats of draft heads: their ``config.json``, their tensor names, and which heads they cannot express."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxspec.checkpoint.heads.block_formats import ROUTED, block_config, block_speculators, native_block, unable_block
from jaxspec.checkpoint.heads.identify import FLAGS, INSIDE, NATIVE, TAPS, AnySpec
from jaxspec.checkpoint.heads.layers import layers_config
from jaxspec.errors import ConfigError
from jaxspec.models.block_head import BlockSpec
from jaxspec.models.draft_head import HeadSpec
from jaxspec.models.medusa import MedusaSpec
from jaxspec.nn.attention import AttentionSpec

ExportFormat = Literal["native", "eagle3", "dflash", "speculators", "medusa"]
FORMATS: tuple[ExportFormat, ...] = ("native", "eagle3", "dflash", "speculators", "medusa")
SPECULATORS_VERSION = "0.9.0"  # of the layout that is written


@dataclass(frozen=True)
class Verifier:
    """The target as a speculators config names it.

    Attributes:
      name: directory or name that vLLM loads it by.
      architectures: of its config.
      drafts: tokens per step that vLLM drafts by default.
    """

    name: str
    architectures: tuple[str, ...] = ()
    drafts: int = 3


def config_for(
    spec: AnySpec, form: ExportFormat, dtype: str, *, reduced: bool, verifier: Verifier | None
) -> dict[str, Any]:
    """Builds the ``config.json`` of a head in a format.

    Raises:
      ConfigError: the format cannot express the head, or is not known; it says why.
    """
    if form not in FORMATS:
        raise ConfigError(f"head: format {form!r} is not known; known are {', '.join(FORMATS)}")
    why = unable(spec, form, reduced=reduced)
    if why:
        raise ConfigError(
            f"head: the {form} format cannot express it: {'; '.join(why)}. {_other_form(spec, form, reduced=reduced)}"
        )
    if isinstance(spec, MedusaSpec):
        return _native_medusa(spec, dtype) if form == "native" else _medusa(spec, dtype)
    if isinstance(spec, BlockSpec):
        return _of_block(spec, form, dtype, verifier)
    if form == "native":
        return _native(spec, dtype)
    if form == "eagle3":
        return _eagle3(spec, dtype)
    return _speculators(spec, dtype, _named(verifier))


def _of_block(spec: BlockSpec, form: ExportFormat, dtype: str, verifier: Verifier | None) -> dict[str, Any]:
    if form == "native":
        return {"architectures": [NATIVE], "dtype": dtype} | native_block(spec)
    if form == "dflash":
        return block_config(spec) | {"torch_dtype": dtype}
    stated = {"speculators_version": SPECULATORS_VERSION, "torch_dtype": dtype}
    return block_speculators(spec, _config_of(_named(verifier), spec.drafts)) | stated


def _named(verifier: Verifier | None) -> Verifier:
    if verifier is None:
        raise ConfigError(
            "head: a speculators config names the target, for vLLM to load it; give its directory (--target) or its "
            "name (--verifier-name)"
        )
    return verifier


def unable(spec: AnySpec, form: ExportFormat, *, reduced: bool) -> list[str]:
    """Lists why a format cannot express a head; empty if it can."""
    if form == "native":
        return []
    if isinstance(spec, MedusaSpec):
        return _unable_medusa(spec, form, reduced=reduced)
    if isinstance(spec, BlockSpec):
        return unable_block(spec, form)
    if form == "dflash":
        return ["it does not draft blocks"]
    if form == "medusa":
        return ["it has decoder layers, Medusa heads have none"]
    why = _unable_everywhere(spec)
    return why + (_unable_eagle3(spec) if form == "eagle3" else _unable_speculators(spec))


def _other_form(spec: AnySpec, form: ExportFormat, *, reduced: bool) -> str:
    """Says what can be done instead."""
    able = [other for other in FORMATS if other not in (form, "native") and not unable(spec, other, reduced=reduced)]
    others = f"These formats can: {', '.join(able)}" if able else "No other engine's format can"
    return f"{others}; jaxspec serves it as it is, and native writes it in jaxspec's own format"


def _unable_medusa(spec: MedusaSpec, form: str, *, reduced: bool) -> list[str]:
    if form != "medusa":
        return ["it is a Medusa head, which has no decoder layer"]
    why = ["its vocabulary is reduced, and Medusa files have no map of ids"] if reduced else []
    return why if spec.draft_vocab else ["it uses the target's vocabulary product, Medusa heads have their own"]


def _unable_everywhere(spec: HeadSpec) -> list[str]:
    asked = {
        "it reads shared experts (commons), which vLLM and SGLang hand to no head": bool(spec.reads.shared_outputs),
        "it predicts the target's experts (routing), for which there is no tensor": bool(spec.routing),
        "it joins by a product as EAGLE-1 does, without the norms of EAGLE-3": spec.join == "product",
        "its product in front of the layers has a bias, which vLLM leaves out": spec.join_bias,
        "it reads the last hidden state besides layer boundaries": spec.last and bool(spec.reads.taps),
        "it reads the embedding itself (layer boundary 0), which no engine taps": 0 in spec.reads.taps,
        "some of its layers see a window, which SGLang's and vLLM's heads do not": any(
            getattr(layer.attention, "window", None) for layer in spec.arch.layers
        ),
        ROUTED: bool(spec.arch.expert_layers),
    }
    return [words for words, applies in asked.items() if applies]


def _unable_eagle3(spec: HeadSpec) -> list[str]:
    first = spec.arch.layers[0].attention
    why = []
    if isinstance(first, AttentionSpec) and first.qk_norm != "none":
        why.append("its queries and keys are normalized (Qwen3), which LlamaForCausalLMEagle3 leaves out")
    if isinstance(first, AttentionSpec) and (first.qkv_bias or first.out_bias) and spec.mask_token is None:
        why.append("its attention has biases, which SGLang leaves out")
    return why


def _unable_speculators(spec: HeadSpec) -> list[str]:
    asked = {
        "it has no taps": not spec.reads.taps,
        "its attention is latent": not isinstance(spec.arch.layers[0].attention, AttentionSpec),
        f"its hidden size {spec.arch.model_dim} is not the target's {spec.target_dim}": (
            spec.arch.model_dim != spec.target_dim
        ),
        "it uses the target's vocabulary product": not spec.draft_vocab,
        "fc_norm is lost by vLLM's reader of peagle": spec.fc_norm and spec.mask_token is not None,
    }
    return [words for words, applies in asked.items() if applies]


def names_in(name: str, spec: AnySpec, form: ExportFormat) -> tuple[str, ...]:
    """Returns a tensor's name in a format; two names where engines expect different ones."""
    if form != "eagle3" or not isinstance(spec, HeadSpec) or spec.mask_token is not None:
        return (name,)
    if len(spec.arch.layers) == 1:
        return (name.replace("layers.0.", "midlayer.", 1),)
    if name.endswith(".input_layernorm.weight") and not name.startswith("layers.0."):
        return name, name.replace("input_layernorm", "hidden_norm")  # vLLM's and SGLang's
    return (name,)


def _native(spec: HeadSpec, dtype: str) -> dict[str, Any]:
    stated = {name: getattr(spec, name) for name in INSIDE}
    return {
        "architectures": [NATIVE],
        "dtype": dtype,
        "head": {"taps": spec.reads.taps, "commons": spec.reads.shared_outputs} | stated,
        "transformer_layer_config": layers_config(spec.arch),
    }


def _native_medusa(spec: MedusaSpec, dtype: str) -> dict[str, Any]:
    return {"architectures": [NATIVE], "dtype": dtype, "head": {"kind": "medusa"} | vars(spec)}


def _medusa(spec: MedusaSpec, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": spec.heads,
        "medusa_num_layers": spec.layers,
        "hidden_size": spec.dim,
        "vocab_size": spec.vocab_size,
        "torch_dtype": dtype,
    }


def _eagle3(spec: HeadSpec, dtype: str) -> dict[str, Any]:
    if not isinstance(spec.arch.layers[0].attention, AttentionSpec):
        title = "Eagle3DeepseekV2ForCausalLM"
    else:
        title = "LlamaForCausalLMEagle3" if spec.mask_token is None else "PEagleDraftModel"
    flags = {name: getattr(spec, name) for name in FLAGS}
    if not spec.norm_output:
        # SpecForge takes false for "no norm in front of the head"; unstated it is what false means elsewhere.
        del flags["norm_output"]
    return {
        "architectures": [title],
        **layers_config(spec.arch),
        **flags,
        "bias": False,
        "draft_vocab_size": spec.draft_vocab or None,
        "target_hidden_size": spec.target_dim,
        "num_aux_hidden_states": spec.parts,
        **_taps(spec),
        **_mask(spec),
        "torch_dtype": dtype,
    }


def _taps(spec: HeadSpec) -> dict[str, Any]:
    """Writes both conventions: boundaries for vLLM at the top, numbers of the blocks before them for SGLang inside."""
    if not spec.reads.taps:
        return {"eagle_config": {"use_aux_hidden_state": False, "norm_before_fc": spec.norm_before_fc}}
    return {
        TAPS: spec.reads.taps,
        "eagle_config": {
            TAPS: tuple(b - 1 for b in spec.reads.taps),
            "use_aux_hidden_state": True,
            "norm_before_fc": spec.norm_before_fc,
        },
    }


def _mask(spec: HeadSpec) -> dict[str, Any]:
    return {} if spec.mask_token is None else {"mask_token_id": spec.mask_token}


def _speculators(spec: HeadSpec, dtype: str, verifier: Verifier) -> dict[str, Any]:
    parallel = spec.mask_token is not None
    algorithm = "peagle" if parallel else "eagle3"
    return {
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": spec.draft_vocab,
        "target_hidden_size": spec.target_dim,
        **{name: getattr(spec, name) for name in FLAGS},
        "embed_requires_grad": spec.own_embedding,
        TAPS: spec.reads.taps,
        "eagle_config": _taps(spec)["eagle_config"],
        **_mask(spec),
        "transformer_layer_config": layers_config(spec.arch),
        "speculators_config": {"algorithm": algorithm} | _config_of(verifier, verifier.drafts),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _config_of(verifier: Verifier, drafts: int) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": verifier.name, "architectures": verifier.architectures},
    }
