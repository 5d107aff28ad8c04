"""Tensor names of Hunyuan-A13B."""

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, NameRule, Table, attention_rules, gated_rules, router_rules

A, HUB = "attention/", "self_attn."

TABLES = {
    "hunyuan_v1_moe": Table(
        top=EMBEDDING,
        layer=(
            *NORMS,
            *(rule for rule in attention_rules() if "_norm_" not in rule.leaf),
            NameRule(f"{A}q_norm_C", (f"{HUB}query_layernorm.weight",)),
            NameRule(f"{A}k_norm_C", (f"{HUB}key_layernorm.weight",)),
            *router_rules("mlp.gate.wg.weight"),
            *gated_rules("ffn/shared/", "mlp.shared_mlp."),
        ),
        expert=gated_rules("ffn/", "mlp.experts.{e}."),
    )
}
