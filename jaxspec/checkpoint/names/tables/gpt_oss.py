"""Tensor names of gpt-oss: all experts of a layer in one tensor, gate and up columns by turns."""

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, NameRule, Table, attention_rules

EXPERTS = "mlp.experts."

TABLES = {
    "gpt_oss": Table(
        top=EMBEDDING,
        layer=(
            *NORMS,
            *attention_rules(),
            NameRule("ffn/router_DE", ("mlp.router.weight",), "transpose"),
            NameRule("ffn/router_bias_E", ("mlp.router.bias",)),
        ),
        expert=(
            NameRule("ffn/gate_up_D2F_{e}", (EXPERTS + "gate_up_proj",), "by_turns"),
            NameRule("ffn/gate_up_bias_2F_{e}", (EXPERTS + "gate_up_proj_bias",), "bias_by_turns"),
            NameRule("ffn/down_FD_{e}", (EXPERTS + "down_proj",)),
            NameRule("ffn/down_bias_D_{e}", (EXPERTS + "down_proj_bias",)),
        ),
        experts_stacked=True,
        scales="blocks",
    )
}
