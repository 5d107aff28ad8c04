"""Tensor names of ERNIE-4.5: those of GLM-4.5, but for the router's bias."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import NameRule, gated_rules, router_rules
from jaxspec.checkpoint.names.tables.glm4_moe import DENSE, GLM

TABLES = {
    "ernie4_5_moe": replace(
        GLM,
        layer=(
            *DENSE,
            *router_rules("mlp.gate.weight"),
            NameRule("ffn/choice_bias_E", ("mlp.moe_statics.e_score_correction_bias",), "row"),
            *gated_rules("ffn/shared/", "mlp.shared_experts."),
        ),
        others=("mtp.", "model.mtp_"),  # multi-token prediction
    )
}
