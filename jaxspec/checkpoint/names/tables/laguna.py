"""Tensor names of Laguna: Qwen2-MoE's, and those of its gates."""

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, NameRule, Table, attention_rules, gated_rules, router_rules

GATE = ("self_attn.g_proj.weight",)

TABLES = {
    "laguna": Table(
        top=EMBEDDING,
        layer=(
            *NORMS,
            *attention_rules(),
            NameRule("attention/head_gate_DH", GATE, "transpose"),
            NameRule("attention/gate_DHC", GATE, "from_rank"),
            *gated_rules("ffn/", "mlp."),
            *router_rules("mlp.gate.weight", "mlp.experts.e_score_correction_bias"),
            *gated_rules("ffn/shared/", "mlp.shared_expert."),
        ),
        expert=gated_rules("ffn/", "mlp.experts.{e}."),
    )
}
