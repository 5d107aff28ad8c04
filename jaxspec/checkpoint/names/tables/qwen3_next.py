"""Tensor names of Qwen3-Next and Qwen3.5: those of Qwen2-MoE, and of gated delta nets."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import EMBEDDING, JOIN_OUTSIDE, MtpNames, NameRule
from jaxspec.checkpoint.names.tables.qwen2_moe import TABLES as QWEN2

A, HUB = "attention/", "linear_attn."
DELTA_NET = (
    NameRule(f"{A}conv_X1K", (f"{HUB}conv1d.weight",)),
    NameRule(f"{A}decay_H", (f"{HUB}A_log",)),
    NameRule(f"{A}decay_bias_H", (f"{HUB}dt_bias",)),
    NameRule(f"{A}out_norm_C", (f"{HUB}norm.weight",)),
    NameRule(f"{A}state_out_HCD", (f"{HUB}out_proj.weight",), "out"),
)
GROUPED = (
    NameRule(f"{A}qkvz_DGX", (f"{HUB}in_proj_qkvz.weight",), "from_rank"),
    NameRule(f"{A}ba_DGX", (f"{HUB}in_proj_ba.weight",), "from_rank"),
)
FLAT = (
    NameRule(f"{A}qkv_DX", (f"{HUB}in_proj_qkv.weight",), "transpose"),
    NameRule(f"{A}z_DX", (f"{HUB}in_proj_z.weight",), "transpose"),
    NameRule(f"{A}ba_D2H", (f"{HUB}in_proj_b.weight", f"{HUB}in_proj_a.weight"), "gate_up"),
)
MOE = QWEN2["qwen2_moe"]
NEXT = replace(
    MOE,
    layer=(*MOE.layer, *DELTA_NET, *GROUPED),
    mtp=MtpNames(shared=JOIN_OUTSIDE, prefix="mtp.layers.{n}."),
    others=("mtp.",),
)

INSIDE = "model.language_model."
LATER = replace(NEXT, layer=(*MOE.layer, *DELTA_NET, *FLAT))

TABLES = {
    "qwen3_next": NEXT,
    "qwen3_5_moe_text": LATER,
    "qwen3_5_moe": replace(
        LATER,
        top=tuple(replace(rule, hub=(rule.hub[0].replace("model.", INSIDE),)) for rule in EMBEDDING),
        expert=(
            NameRule("ffn/gate_up_D2F_{e}", ("mlp.experts.gate_up_proj",), "halves"),
            NameRule("ffn/down_FD_{e}", ("mlp.experts.down_proj",), "transpose"),
        ),
        experts_stacked=True,
        expert_apart=MOE.expert,  # quantized releases, and the prediction of Qwen3.5 but not of 3.6
        prefix=INSIDE + "layers.{y}.",
        others=("mtp.", "model.visual."),
    ),
}
