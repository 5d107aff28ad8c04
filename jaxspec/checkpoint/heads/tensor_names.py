"""Tensor names of draft heads: those that EAGLE-1, EAGLE-3, P-EAGLE and speculators share, and Medusa's."""

from collections.abc import Iterator

from jaxspec.checkpoint.heads.block_names import block_rules
from jaxspec.checkpoint.heads.layer_names import FEED_FORWARD, layer_rules
from jaxspec.checkpoint.names.table import NORMS, NameRule, attention_rules
from jaxspec.checkpoint.names.tables.deepseek import LATENT
from jaxspec.models.block_head import BlockSpec
from jaxspec.models.draft_head import HeadSpec
from jaxspec.models.medusa import MedusaSpec

MIXER = tuple({rule.leaf: rule for rule in (*LATENT, *attention_rules())}.values())
TOP = (
    NameRule("embed_VD", ("embed_tokens.weight",)),
    NameRule("input_norm_X", ("input_norm.weight",)),
    NameRule("fc_XD", ("fc.weight",), "transpose"),
    NameRule("fc_bias_D", ("fc.bias",)),
    NameRule("mask_X", ("mask_hidden",), "slot"),
    NameRule("first/join_XD", ("fc.weight",), "transpose"),
    NameRule("first/join_bias_D", ("fc.bias",)),
    NameRule("first/feature_norm_D", ("layers.0.hidden_norm.weight",)),
    NameRule("first/embed_norm_D", ("layers.0.input_layernorm.weight",)),
    NameRule("first/ffn_norm_D", ("layers.0.post_attention_layernorm.weight",)),
    NameRule("norm_D", ("norm.weight",)),
    NameRule("head_DW", ("lm_head.weight",), "transpose"),
    NameRule("routing_DYE", ("routing.weight",), "from_rank"),
)


def head_rules(spec: HeadSpec | BlockSpec | MedusaSpec) -> Iterator[NameRule]:
    """Yields every rule of a head with its numbers filled in; rules whose parameter it lacks do not apply."""
    if isinstance(spec, MedusaSpec):
        yield from _medusa_rules(spec)
        return
    if isinstance(spec, BlockSpec):
        yield from block_rules(spec)
        return
    yield from TOP
    yield NameRule("part_norm_XD", tuple(f"fc_norm.{n}.weight" for n in range(spec.parts)), "each")
    for y, layer in enumerate(spec.arch.layers):
        path, norms = (f"layers_{y - 1}/", NORMS) if y else ("first/", ())
        yield from layer_rules((*norms, *MIXER, *FEED_FORWARD), path, f"layers.{y}.", layer)


def _medusa_rules(spec: MedusaSpec) -> Iterator[NameRule]:
    for m in range(spec.heads):
        for layer in range(spec.layers):
            yield NameRule(f"medusa_{m}/residual_{layer}_DX", (f"{m}.{layer}.linear.weight",), "transpose")
            yield NameRule(f"medusa_{m}/residual_bias_{layer}_X", (f"{m}.{layer}.linear.bias",))
        yield NameRule(f"medusa_{m}/head_DW", (f"{m}.{spec.layers}.weight",), "transpose")
