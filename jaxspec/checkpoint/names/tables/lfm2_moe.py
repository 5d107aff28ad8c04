"""Tensor names of LFM2-MoE."""

from jaxspec.checkpoint.names.table import EMBEDDING, NameRule, Table, attention_rules, gated_rules, router_rules

A, F, W = "attention/", "feed_forward.", ("w1", "w3", "w2")

TABLES = {
    "lfm2_moe": Table(
        top=(EMBEDDING[0], NameRule("norm_D", ("model.embedding_norm.weight",)), EMBEDDING[2]),
        layer=(
            NameRule("attention_norm_D", ("operator_norm.weight",)),
            NameRule("ffn_norm_D", ("ffn_norm.weight",)),
            *(rule for rule in attention_rules(out="out_proj") if "_norm_" not in rule.leaf),
            NameRule(f"{A}q_norm_C", ("self_attn.q_layernorm.weight",)),
            NameRule(f"{A}k_norm_C", ("self_attn.k_layernorm.weight",)),
            NameRule(f"{A}in_D3X", ("conv.in_proj.weight",), "halves"),
            NameRule(f"{A}conv_X1K", ("conv.conv.weight",)),
            NameRule(f"{A}conv_bias_X", ("conv.conv.bias",)),
            NameRule(f"{A}mix_out_XD", ("conv.out_proj.weight",), "transpose"),
            *gated_rules("ffn/", F, *W),
            *router_rules(f"{F}gate.weight", f"{F}expert_bias"),
        ),
        expert=gated_rules("ffn/", F + "experts.{e}.", *W),
    )
}
