"""Tensor names of Trinity (AFMoE)."""

from jaxspec.checkpoint.names.table import EMBEDDING, NameRule, Table, attention_rules, gated_rules, router_rules

NORMS = {
    "attention_norm_D": "input_layernorm",
    "attention_out_norm_D": "post_attention_layernorm",
    "ffn_norm_D": "pre_mlp_layernorm",
    "ffn_out_norm_D": "post_mlp_layernorm",
}
TABLES = {
    "afmoe": Table(
        top=EMBEDDING,
        layer=(
            *(NameRule(leaf, (f"{name}.weight",)) for leaf, name in NORMS.items()),
            *attention_rules(),
            NameRule("attention/gate_DHC", ("self_attn.gate_proj.weight",), "from_rank"),
            *gated_rules("ffn/", "mlp."),
            *router_rules("mlp.router.gate.weight", "mlp.expert_bias"),
            *gated_rules("ffn/shared/", "mlp.shared_experts."),
        ),
        expert=gated_rules("ffn/", "mlp.experts.{e}."),
    )
}
