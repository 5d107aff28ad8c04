"""Tensor names of OPT."""

from jaxspec.checkpoint.names.table import Rule, Table, attention_rules

MODEL = "model.decoder."


def _norm(leaf: str, hub: str) -> tuple[Rule, Rule]:
    return Rule(f"{leaf}_D", (f"{hub}.weight",)), Rule(f"{leaf}_bias_D", (f"{hub}.bias",))


TABLES = {
    "opt": Table(
        top=(
            Rule("embed_VD", (f"{MODEL}embed_tokens.weight",)),
            Rule("position_SD", (f"{MODEL}embed_positions.weight",)),
            Rule("project_in_XD", (f"{MODEL}project_in.weight",), "transpose"),
            Rule("project_out_DX", (f"{MODEL}project_out.weight",), "transpose"),
            *_norm("norm", f"{MODEL}final_layer_norm"),
            Rule("head_DV", ("lm_head.weight",), "transpose"),
        ),
        layer=(
            *_norm("attention_norm", "self_attn_layer_norm"),
            *_norm("ffn_norm", "final_layer_norm"),
            *attention_rules(out="out_proj"),
            Rule("ffn/up_DF", ("fc1.weight",), "transpose"),
            Rule("ffn/up_bias_F", ("fc1.bias",)),
            Rule("ffn/down_FD", ("fc2.weight",), "transpose"),
            Rule("ffn/down_bias_D", ("fc2.bias",)),
        ),
        prefix=MODEL + "layers.{y}.",
    )
}
