"""Tensor names of DeepSeek-V4, which are those of its released code."""

from jaxspec.checkpoint.names.table import MtpNames, NameRule, Table, gated_rules, router_rules

A, HUB = "attention/", "attn."


def _compressor(leaf: str, hub: str) -> tuple[NameRule, ...]:
    leaf, hub = f"{leaf}compressor/", f"{hub}compressor."
    return (
        NameRule(f"{leaf}kv_gate_D2X", (f"{hub}wkv.weight", f"{hub}wgate.weight"), "gate_up"),
        NameRule(f"{leaf}place_TX", (f"{hub}ape",)),
        NameRule(f"{leaf}norm_C", (f"{hub}norm.weight",)),
    )


def _hyper(leaf: str, hub: str, rows: str = "X") -> tuple[NameRule, ...]:
    return (
        NameRule(f"{leaf}_fn_{rows}S", (f"{hub}_fn",)),
        NameRule(f"{leaf}_base_{rows}", (f"{hub}_base",)),
        NameRule(f"{leaf}_scale_X", (f"{hub}_scale",)),
    )


ATTENTION = (
    NameRule(f"{A}q_a_DR", (f"{HUB}wq_a.weight",), "transpose"),
    NameRule(f"{A}q_norm_R", (f"{HUB}q_norm.weight",)),
    NameRule(f"{A}q_b_RHC", (f"{HUB}wq_b.weight",), "from_rank"),
    NameRule(f"{A}kv_DC", (f"{HUB}wkv.weight",), "transpose"),
    NameRule(f"{A}kv_norm_C", (f"{HUB}kv_norm.weight",)),
    NameRule(f"{A}sinks_H", (f"{HUB}attn_sink",)),
    NameRule(f"{A}out_a_XC", (f"{HUB}wo_a.weight",), "rows"),
    NameRule(f"{A}out_b_XD", (f"{HUB}wo_b.weight",), "transpose"),
    *_compressor(A, HUB),
    NameRule(f"{A}indexer/q_RHC", (f"{HUB}indexer.wq_b.weight",), "from_rank"),
    NameRule(f"{A}indexer/weight_DH", (f"{HUB}indexer.weights_proj.weight",), "transpose"),
    *_compressor(f"{A}indexer/", f"{HUB}indexer."),
)
W = ("w1", "w3", "w2")

TABLES = {
    "deepseek_v4": Table(
        top=(
            NameRule("embed_VD", ("embed.weight",)),
            NameRule("norm_D", ("norm.weight",)),
            NameRule("head_DV", ("head.weight",), "transpose"),
            *_hyper("hyper_head/head", "hc_head", "N"),
        ),
        layer=(
            NameRule("attention_norm_D", ("attn_norm.weight",)),
            NameRule("ffn_norm_D", ("ffn_norm.weight",)),
            *_hyper("attention_hyper/mix", "hc_attn"),
            *_hyper("ffn_hyper/mix", "hc_ffn"),
            *ATTENTION,
            *router_rules("ffn.gate.weight", "ffn.gate.bias"),
            NameRule("ffn/table_VA", ("ffn.gate.tid2eid",)),
            *gated_rules("ffn/shared/", "ffn.shared_experts.", *W),
        ),
        expert=gated_rules("ffn/", "ffn.experts.{e}.", *W),
        mtp=MtpNames(
            (
                NameRule("embed_norm_D", ("enorm.weight",)),
                NameRule("hidden_norm_D", ("hnorm.weight",)),
                NameRule("norm_D", ("norm.weight",)),
                NameRule("embed_proj_DX", ("e_proj.weight",), "transpose"),
                NameRule("hidden_proj_DX", ("h_proj.weight",), "transpose"),
                *_hyper("hyper_head/head", "hc_head", "N"),
            ),
            prefix="mtp.{n}.",
        ),
        prefix="layers.{y}.",
        scales="scale",
    )
}
