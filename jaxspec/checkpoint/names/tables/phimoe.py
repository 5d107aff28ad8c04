"""Tensor names of Phi-3.5-MoE: Mixtral's, and those of biases."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, NameRule, layer_norm_rules
from jaxspec.checkpoint.names.tables.mixtral import TABLES as MIXTRAL

TABLE = MIXTRAL["mixtral"]

TABLES = {
    "phimoe": replace(
        TABLE,
        top=(
            EMBEDDING[0],
            *layer_norm_rules("norm", "model.norm"),
            EMBEDDING[2],
            NameRule("head_bias_V", ("lm_head.bias",)),
        ),
        layer=(
            *layer_norm_rules("attention_norm", "input_layernorm"),
            *layer_norm_rules("ffn_norm", "post_attention_layernorm"),
            *TABLE.layer[len(NORMS) :],
        ),
    )
}
