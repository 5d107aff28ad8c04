"""Tensor names of MiMo-V2-Flash: GLM-4.5's, with sinks."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import NameRule
from jaxspec.checkpoint.names.tables.glm4_moe import GLM

TABLES = {
    "mimo_v2_flash": replace(
        GLM,
        layer=(
            *(rule for rule in GLM.layer if rule.leaf != "attention/sinks_H"),
            NameRule("attention/sinks_H", ("self_attn.attention_sink_bias",)),
        ),
        others=("model.mtp.",),
    )
}
