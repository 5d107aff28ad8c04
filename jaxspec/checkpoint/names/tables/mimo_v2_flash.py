"""Tensor names of MiMo-V2-Flash: GLM-4.5's, with sinks."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import JOIN, LAST_NORM, MtpNames, NameRule
from jaxspec.checkpoint.names.tables.glm4_moe import GLM

LAYER = (
    *(rule for rule in GLM.layer if rule.leaf != "attention/sinks_H"),
    NameRule("attention/sinks_H", ("self_attn.attention_sink_bias",)),
)
TABLES = {
    "mimo_v2_flash": replace(
        GLM,
        layer=LAYER,
        mtp=MtpNames(
            (*JOIN, LAST_NORM),
            prefix="model.mtp.layers.{n}.",
            layer=(
                *(rule for rule in LAYER if rule.leaf != "ffn_norm_D"),
                NameRule("ffn_norm_D", ("pre_mlp_layernorm.weight",)),
            ),
        ),
        others=("model.mtp.",),
    )
}
