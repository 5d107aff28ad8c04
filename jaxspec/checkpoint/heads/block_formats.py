"""The configs that are written for heads that draft blocks, and which heads a format cannot express."""

from dataclasses import fields
from typing import Any

from jaxspec.checkpoint.heads.block_config import NESTED
from jaxspec.checkpoint.heads.layers import layers_config
from jaxspec.models.block_head import BlockSpec

ROUTED = "its layers have experts, and the other engines' heads of this kind are dense"
INSIDE = tuple(field.name for field in fields(BlockSpec) if field.name not in ("arch", "reads"))


def native_block(spec: BlockSpec) -> dict[str, Any]:
    """Builds the config of our own format, which states everything."""
    stated = {name: getattr(spec, name) for name in INSIDE}
    return {
        "head": {"kind": "block", "taps": spec.reads.taps} | stated,
        "transformer_layer_config": layers_config(spec.arch),
    }


def block_config(spec: BlockSpec) -> dict[str, Any]:
    """Builds the config that vLLM, SGLang and SpecForge read: z-lab's, or DeepSpec's for DSpark.

    What some of them look for at the top and others in ``dflash_config`` stands in both.
    """
    both: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token,
        "target_layer_ids": [b - 1 for b in spec.reads.taps],
        "sample_from_anchor": spec.from_anchor,
    }
    title = "DFlash2DraftModel" if spec.conv_taps else "DFlashDraftModel"
    if _is_dspark(spec):
        title, both = "Qwen3DSparkModel", both | _dspark(spec)
    nested = both | {
        "input_embedding_scale": spec.embedding_scale,
        "output_multiplier": spec.output_scale,
        "final_logit_softcapping": spec.softcap,
    }
    return {
        "architectures": [title],
        **layers_config(spec.arch),
        **both,
        NESTED: nested | _dflash2(spec) | ({"projector_type": "dspark"} if _is_dspark(spec) else {}),
        **({"is_causal": spec.causal[0]} if spec.causal != _slides(spec) else {}),
        **({"draft_vocab_size": spec.draft_vocab} if spec.draft_vocab else {}),
        "target_hidden_size": spec.target_dim,
    }


def block_speculators(spec: BlockSpec, proposal: dict[str, Any]) -> dict[str, Any]:
    """Builds the config of speculators; ``proposal`` names the target and how it is drafted for."""
    method = "dspark" if _is_dspark(spec) else "dflash2" if spec.conv_taps else "dflash"
    titles = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel"}
    return {
        "architectures": [titles[method]],
        "speculators_model_type": method,
        "draft_vocab_size": spec.width,
        "target_hidden_size": spec.target_dim,
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token,
        "aux_hidden_state_layer_ids": spec.reads.taps,
        "sample_from_anchor": spec.from_anchor,
        "sliding_window_non_causal": any(_slides(spec)) and not any(spec.causal),
        **(_dspark(spec) if method == "dspark" else _dflash2(spec)),
        "transformer_layer_config": layers_config(spec.arch),
        "speculators_config": {"algorithm": method} | proposal,
        "tie_word_embeddings": False,
    }


def unable_block(spec: BlockSpec, form: str) -> list[str]:
    """Lists why a format cannot express a head; empty if it can."""
    if form not in ("dflash", "speculators"):
        return ["it drafts blocks"]
    slides, stated = _slides(spec), form == "speculators"
    normal = spec.embedding_scale == spec.output_scale == 1 and not spec.softcap
    usual = [slides, (False,) * len(slides)] if stated else [slides, (False,) * len(slides), (True,) * len(slides)]
    asked = {
        "its queries and keys are not normalized, those of DFlash are": any(
            getattr(layer.attention, "qk_norm", "") != "head" for layer in spec.arch.layers
        ),
        "the embedding of its mask is a file of its own, which is not written": spec.own_mask,
        "its layers see their blocks in a way that no config states": spec.causal not in usual,
        "its windows end where its other layers' do not": any(slides) and spec.window_from_anchor != stated,
        "it has a selector or a convolution alone, DFlash2 has both": bool(spec.conv_taps) != bool(spec.selector_rank),
        "it scales embeddings or logits": stated and not normal,
        "it has an embedding of its own": stated and spec.own_embedding,
        "it has a product of its own over the whole vocabulary": stated and spec.draft_vocab == spec.arch.vocab_size,
        ROUTED: bool(spec.arch.expert_layers),
        "it has both DFlash2's and DSpark's parts": bool(spec.conv_taps) and _is_dspark(spec),
    }
    return [words for words, applies in asked.items() if applies]


def _is_dspark(spec: BlockSpec) -> bool:
    return spec.from_anchor or bool(spec.markov_rank) or spec.confidence != "none"


def _slides(spec: BlockSpec) -> tuple[bool, ...]:
    return tuple(view.window is not None for view in spec.views)


def _dflash2(spec: BlockSpec) -> dict[str, Any]:
    if not spec.conv_taps:
        return {}
    return {
        "conv_kernel_size": spec.conv_taps,
        "conv_group_size": spec.conv_group,
        "selector_rank": spec.selector_rank,
        "selector_top_k": spec.selector_top_k,
    }


def _dspark(spec: BlockSpec) -> dict[str, Any]:
    return {
        "markov_rank": spec.markov_rank,
        "markov_head_type": spec.markov_kind,
        "enable_confidence_head": spec.confidence != "none",
        "confidence_head_with_markov": spec.confidence == "markov",
    }
