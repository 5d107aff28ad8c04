"""Tensor names of Qwen2-MoE, and of the families that kept them without its shared expert."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import (
    EMBEDDING,
    JOIN_OUTSIDE,
    NORMS,
    MtpNames,
    NameRule,
    Table,
    attention_rules,
    gated_rules,
    router_rules,
)

QWEN = Table(
    top=EMBEDDING,
    layer=(
        *NORMS,
        *attention_rules(),
        *gated_rules("ffn/", "mlp."),
        *router_rules("mlp.gate.weight"),
        NameRule("ffn/shared_gate_D1", ("mlp.shared_expert_gate.weight",), "transpose"),
        *gated_rules("ffn/shared/", "mlp.shared_expert."),
    ),
    expert=gated_rules("ffn/", "mlp.experts.{e}."),
)
TABLES = dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), QWEN) | {
    "mellum": replace(QWEN, mtp=MtpNames(shared=JOIN_OUTSIDE, prefix="mtp.layers.{n}."), others=("mtp.",))
}
