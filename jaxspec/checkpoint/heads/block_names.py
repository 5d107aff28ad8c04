"""Tensor names of heads that draft blocks, as z-lab, SpecForge, DeepSpec and speculators write them."""

from collections.abc import Iterator

from jaxspec.checkpoint.heads.deepseek_stages import stage_rules
from jaxspec.checkpoint.heads.layer_names import FEED_FORWARD, layer_rules
from jaxspec.checkpoint.heads.tensors import MASK_EMBEDDING
from jaxspec.checkpoint.names.table import NORMS, NameRule, attention_rules
from jaxspec.models.block_head import BlockSpec

TOP = (
    NameRule("embed_VD", ("embed_tokens.weight",)),
    NameRule("mask_D", (MASK_EMBEDDING,)),
    NameRule("fc_XD", ("fc.weight",), "transpose"),
    NameRule("feature_norm_D", ("hidden_norm.weight",)),
    NameRule("norm_D", ("norm.weight",)),
    NameRule("head_DW", ("lm_head.weight",), "transpose"),
    NameRule("markov/markov_in_VR", ("markov_head.markov_w1.weight",)),
    NameRule("markov/markov_out_RW", ("markov_head.markov_w2.weight",), "transpose"),
    NameRule("markov/markov_gate_XR", ("markov_head.gate_proj.weight",), "transpose"),
    NameRule("markov/markov_gate_bias_R", ("markov_head.gate_proj.bias",)),
    NameRule("markov/markov_joint_XR", ("markov_head.joint_proj.weight",), "transpose"),
    NameRule("markov/markov_joint_bias_R", ("markov_head.joint_proj.bias",)),
    NameRule("acceptance/confidence_X1", ("confidence_head.proj.weight",), "transpose"),
    NameRule("acceptance/confidence_bias_X", ("confidence_head.proj.bias",)),
    NameRule("selector/predecessor_VR", ("candidate_selector.predecessor_codebook",)),
    NameRule("selector/successor_VR", ("candidate_selector.successor_codebook",)),
    NameRule("selector/context_DR", ("candidate_selector.hidden_projection.weight",), "transpose"),
)
A, HUB = "attention/", "self_attn."
CONVOLUTIONS = tuple(
    rule
    for ours, hub in (("attention_conv", "attention_conv"), ("ffn_conv", "mlp_conv"))
    for rule in (
        NameRule(f"{ours}/base_XTD", (f"{hub}.base_kernel",)),
        NameRule(f"{ours}/kernel_DX", (f"{hub}.kernel_projection.weight",), "transpose"),
    )
)
LAYER = (
    *NORMS,
    NameRule(f"{A}query_DHC", (f"{HUB}q_proj.weight",), "from_rank"),
    NameRule(f"{A}query_bias_HC", (f"{HUB}q_proj.bias",), "heads"),
    NameRule(f"{A}key_value_DGXC", (f"{HUB}k_proj.weight", f"{HUB}v_proj.weight"), "key_value"),
    NameRule(f"{A}key_value_bias_GXC", (f"{HUB}k_proj.bias", f"{HUB}v_proj.bias"), "key_value"),
    *(rule for rule in attention_rules() if "qkv" not in rule.leaf),
    *FEED_FORWARD,
    *CONVOLUTIONS,
)


def block_rules(spec: BlockSpec) -> Iterator[NameRule]:
    """Yields every rule with its numbers filled in; rules whose parameter the head lacks do not apply."""
    if spec.arch.hyper is not None:
        yield from stage_rules(spec.arch)
        return
    yield from TOP
    for y, layer in enumerate(spec.arch.layers):
        yield from layer_rules(LAYER, f"layers_{y}/", f"layers.{y}.", layer)
