"""Tensor names of Ling 1 and 2, and of Sarvam-30B: queries, keys and values in one tensor."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import (
    JOIN,
    LAST_NORM,
    NORMS,
    MtpNames,
    NameRule,
    attention_rules,
    gated_rules,
    router_rules,
)
from jaxspec.checkpoint.names.tables.deepseek import NO_COPIES
from jaxspec.checkpoint.names.tables.kimi_linear import LING
from jaxspec.checkpoint.names.tables.kimi_linear import TABLES as LING_3

A = "attention/"
FUSED = {
    "qkv_DGQC": ("query_key_value.weight", "qkv_rows"),
    "qkv_bias_GQC": ("query_key_value.bias", "qkv_rows"),
    "q_norm_C": ("query_layernorm.weight", "copy"),
    "k_norm_C": ("key_layernorm.weight", "copy"),
}
TABLES = dict.fromkeys(
    ("bailing_moe", "sarvam_moe"),
    replace(
        NO_COPIES,
        top=LING_3["bailing_hybrid"].top,
        layer=(
            *NORMS,
            *(NameRule(A + leaf, (LING + hub,), pack) for leaf, (hub, pack) in FUSED.items()),
            *(rule for rule in attention_rules(LING, "dense") if rule.leaf.startswith(f"{A}out")),
            *gated_rules("ffn/", "mlp."),
            *router_rules("mlp.gate.weight", "mlp.gate.expert_bias"),
            *gated_rules("ffn/shared/", "mlp.shared_experts."),
        ),
        mtp=MtpNames((*JOIN, LAST_NORM)),
    ),
)
