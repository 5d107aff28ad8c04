"""Qwen3-MoE: normalized query and key heads, many small experts, no shared expert."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="qwen3_moe",
    mixer=GqaRow(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        window_switch="use_sliding_window",
    ),
    moe=MoeRow(experts=("num_experts", "num_local_experts"), renormalize="norm_topk_prob", sparse_step=True),
    defaults={"sliding_window": 4096},
)
