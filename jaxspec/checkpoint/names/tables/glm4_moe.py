"""Tensor names of GLM-4.5 to 4.7: Llama's attention, DeepSeek-V3's experts and its multi-token prediction."""

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, Rule, Table, attention_rules, gated_rules, router_rules

DEEPSEEK_FFN = (
    *gated_rules("ffn/", "mlp."),
    *router_rules("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
    *gated_rules("ffn/shared/", "mlp.shared_experts."),
)
DEEPSEEK_EXPERT = gated_rules("ffn/", "mlp.experts.{e}.")
DEEPSEEK_MTP = (
    Rule("embed_norm_D", ("enorm.weight",)),
    Rule("hidden_norm_D", ("hnorm.weight",)),
    Rule("join_XD", ("eh_proj.weight",), "transpose"),
    Rule("norm_D", ("shared_head.norm.weight",)),
)
DEEPSEEK_COPIES = ("embed_tokens.weight", "shared_head.head.weight")

TABLES = {
    "glm4_moe": Table(
        top=EMBEDDING,
        layer=(*NORMS, *attention_rules(), *DEEPSEEK_FFN),
        expert=DEEPSEEK_EXPERT,
        mtp=DEEPSEEK_MTP,
        mtp_copies=DEEPSEEK_COPIES,
    )
}
