"""Qwen2-MoE: biased queries, keys and values, many small experts and one gated shared expert."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="qwen2_moe",
    mixer=GqaRow(qkv_bias=True, window_switch="use_sliding_window", window_until="max_window_layers", alternating=True),
    moe=MoeRow(
        experts=("num_experts",),
        renormalize="norm_topk_prob",
        shared_hidden="shared_expert_intermediate_size",
        shared_gate=True,
        sparse_step=True,
    ),
    defaults={"sliding_window": 4096, "max_window_layers": 28},
    implied={"qkv_bias": True, "attention_bias": (True, False)},  # the second is Llama's key, which Qwen2 leaves aside
)
