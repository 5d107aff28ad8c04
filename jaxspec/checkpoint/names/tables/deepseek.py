"""Tensor names of DeepSeek-V2, V3 and V3.2, and of Kimi and GLM, which kept them."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import (
    EMBEDDING,
    JOIN,
    NORMS,
    MtpNames,
    NameRule,
    Table,
    gated_rules,
    router_rules,
)

A, HUB = "attention/", "self_attn."
LATENT = (
    NameRule(f"{A}q_DHC", (f"{HUB}q_proj.weight",), "from_rank"),
    NameRule(f"{A}q_a_DR", (f"{HUB}q_a_proj.weight",), "transpose"),
    NameRule(f"{A}q_a_bias_R", (f"{HUB}q_a_proj.bias",)),
    NameRule(f"{A}q_norm_R", (f"{HUB}q_a_layernorm.weight",)),
    NameRule(f"{A}q_b_RHC", (f"{HUB}q_b_proj.weight",), "from_rank"),
    NameRule(f"{A}kv_a_DX", (f"{HUB}kv_a_proj_with_mqa.weight",), "transpose"),
    NameRule(f"{A}kv_a_bias_X", (f"{HUB}kv_a_proj_with_mqa.bias",)),
    NameRule(f"{A}kv_norm_R", (f"{HUB}kv_a_layernorm.weight",)),
    NameRule(f"{A}kv_b_HXR", (f"{HUB}kv_b_proj.weight",), "head_rows"),
    NameRule(f"{A}out_HCD", (f"{HUB}o_proj.weight",), "out"),
    NameRule(f"{A}out_bias_D", (f"{HUB}o_proj.bias",)),
)
INDEXER = (
    NameRule(f"{A}indexer/q_RHC", (f"{HUB}indexer.wq_b.weight",), "from_rank"),
    NameRule(f"{A}indexer/k_DC", (f"{HUB}indexer.wk.weight",), "transpose"),
    NameRule(f"{A}indexer/k_norm_C", (f"{HUB}indexer.k_norm.weight",)),
    NameRule(f"{A}indexer/k_norm_bias_C", (f"{HUB}indexer.k_norm.bias",)),
    NameRule(f"{A}indexer/weight_DH", (f"{HUB}indexer.weights_proj.weight",), "transpose"),
)
FFN = (
    *gated_rules("ffn/", "mlp."),
    *router_rules("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    *gated_rules("ffn/shared/", "mlp.shared_experts."),
)
DEEPSEEK = Table(
    top=EMBEDDING,
    layer=(*NORMS, *LATENT, *INDEXER, *FFN),
    expert=gated_rules("ffn/", "mlp.experts.{e}."),
    mtp=MtpNames(
        (*JOIN, NameRule("norm_D", ("shared_head.norm.weight",))),
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
)
KIMI = "language_model."
KIMI_INSIDE = replace(
    DEEPSEEK,
    top=tuple(replace(rule, hub=tuple(KIMI + name for name in rule.hub)) for rule in EMBEDDING),
    prefix=KIMI + DEEPSEEK.prefix,
    others=("vision_tower.", "mm_projector."),
)

# GLM-5's repositories leave the copies out.
NO_COPIES = replace(DEEPSEEK, mtp=replace(DEEPSEEK.mtp, copies=()))

TABLES = (
    dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "sarvam_mla"), DEEPSEEK)
    | dict.fromkeys(("glm_moe_dsa", "glm4_moe_lite"), NO_COPIES)
    | {"kimi_k25": KIMI_INSIDE}
)
