"""Trinity (AFMoE): rotation in windowed layers alone, gated heads, norms around every part, DeepSeek's experts."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import FULL, NEAR, GqaRow
from jaxspec.models.mixers.hybrid import HybridRow
from jaxspec.models.rows import JoinRow, ScaleRow

ATTENTION = GqaRow(
    qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", gate="gating", gate_function="sigmoid"
)
FAMILY = Family(
    model_type="afmoe",
    mixer=HybridRow(
        {NEAR: ATTENTION, FULL: replace(ATTENTION, rope=False, windows="never")},
        interval="global_attn_every_n_layers",
        other=NEAR,
    ),
    moe=replace(
        DEEPSEEK_MOE,
        experts=("num_experts",),
        renormalize="route_norm",
        scale="route_scale",
        shared_count="num_shared_experts",
        first_dense="num_dense_layers",
        groups=(("n_group", "num_expert_groups"), "topk_group"),
    ),
    joins=dict.fromkeys(("attention", "ffn"), JoinRow(out_norm=True)),
    scales=ScaleRow(root="mup_enabled"),
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "sliding_window": 1024,
        "gating": "per-element",
        "route_norm": True,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
    },
    implied={"score_func": "sigmoid", "num_limited_groups": 1, "use_grouped_mm": ...},
)
