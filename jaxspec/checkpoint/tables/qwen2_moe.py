"""Tensor names of Qwen2-MoE."""

from jaxspec.checkpoint.table import EMBEDDING, Rule, Table, attention_rules, gated_rules

MLP = "model.layers.{y}.mlp."

TABLES = {
    "qwen2_moe": Table(
        top=EMBEDDING,
        attention=attention_rules(),
        dense=gated_rules("layers_{y}/ffn/", MLP),
        moe=(
            Rule("layers_{y}/ffn/router_DE", (MLP + "gate.weight",), "transpose"),
            Rule("layers_{y}/ffn/shared_gate_D1", (MLP + "shared_expert_gate.weight",), "transpose"),
            *gated_rules("layers_{y}/ffn/shared/", MLP + "shared_expert."),
        ),
        expert=gated_rules("layers_{y}/ffn/", MLP + "experts.{e}."),
    )
}
