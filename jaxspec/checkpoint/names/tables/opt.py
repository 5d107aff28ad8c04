"""Tensor names of OPT."""

from jaxspec.checkpoint.names.table import NameRule, Table, attention_rules, layer_norm_rules

MODEL = "model.decoder."


TABLES = {
    "opt": Table(
        top=(
            NameRule("embed_VD", (f"{MODEL}embed_tokens.weight",)),
            NameRule("position_SD", (f"{MODEL}embed_positions.weight",)),
            NameRule("project_in_XD", (f"{MODEL}project_in.weight",), "transpose"),
            NameRule("project_out_DX", (f"{MODEL}project_out.weight",), "transpose"),
            *layer_norm_rules("norm", f"{MODEL}final_layer_norm"),
            NameRule("head_DV", ("lm_head.weight",), "transpose"),
        ),
        layer=(
            *layer_norm_rules("attention_norm", "self_attn_layer_norm"),
            *layer_norm_rules("ffn_norm", "final_layer_norm"),
            *attention_rules(out="out_proj"),
            NameRule("ffn/up_DF", ("fc1.weight",), "transpose"),
            NameRule("ffn/up_bias_F", ("fc1.bias",)),
            NameRule("ffn/down_FD", ("fc2.weight",), "transpose"),
            NameRule("ffn/down_bias_D", ("fc2.bias",)),
        ),
        prefix=MODEL + "layers.{y}.",
    )
}
