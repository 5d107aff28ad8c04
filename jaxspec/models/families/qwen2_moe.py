"""Qwen2-MoE: biased queries, keys and values, many small experts and one gated shared expert."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="qwen2_moe",
    mixer=GqaRow(qkv_bias=True, window_switch="use_sliding_window", window_from="max_window_layers"),
    moe=MoeRow(
        experts=("num_experts",),
        renormalise="norm_topk_prob",
        shared_hidden="shared_expert_intermediate_size",
        shared_gate=True,
        sparse_step=True,
    ),
)
