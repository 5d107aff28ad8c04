"""Tensor names of ERNIE-4.5: those of GLM-4.5, but for the router's bias."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import MtpNames, NameRule, gated_rules, router_rules
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
        mtp=MtpNames(
            shared=(
                NameRule("embed_norm_D", ("model.mtp_emb_norm.0.weight",)),
                NameRule("hidden_norm_D", ("model.mtp_hidden_norm.0.weight",)),
                NameRule("join_XD", ("model.mtp_linear_proj.0.weight",), "transpose"),
                NameRule("norm_D", ("model.norm.weight",)),  # the model's own
            ),
            prefix="model.mtp_block.{n}.",
        ),
        others=("mtp.", "model.mtp_"),
    )
}
