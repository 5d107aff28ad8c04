"""Tensor names of Step 3.5 and of the text model of 3.7: all experts of a layer in one tensor for each product."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import (
    EMBEDDING,
    JOIN,
    NORMS,
    MtpNames,
    NameRule,
    Table,
    attention_rules,
    gated_rules,
    router_rules,
)

STEP = Table(
    top=EMBEDDING,
    layer=(
        *NORMS,
        *attention_rules(),
        NameRule("attention/head_gate_DH", ("self_attn.g_proj.weight",), "transpose"),
        *gated_rules("ffn/", "mlp."),
        *router_rules("moe.gate.weight", "moe.router_bias"),
        *gated_rules("ffn/shared/", "share_expert."),
    ),
    expert=(
        NameRule("ffn/gate_up_D2F_{e}", ("moe.gate_proj.weight", "moe.up_proj.weight"), "gate_up"),
        NameRule("ffn/down_FD_{e}", ("moe.down_proj.weight",), "transpose"),
    ),
    experts_stacked=True,
    mtp=MtpNames(
        (
            *JOIN,
            NameRule("norm_D", ("transformer.shared_head.norm.weight",)),
            NameRule("head_DV", ("transformer.shared_head.output.weight",), "transpose"),
        )
    ),
    others=("model.layers.45.", "model.layers.46.", "model.layers.47."),  # multi-token prediction, after 45 layers
)

TABLES = {"step3p5": STEP, "step3p7": replace(STEP, others=(*STEP.others, "vision_model.", "vit_large_projector."))}
