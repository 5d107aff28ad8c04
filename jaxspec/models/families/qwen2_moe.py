"""Qwen2-MoE: biased queries, keys and values, many small experts and one gated shared expert."""

from jaxspec.models.family import Family, MoeRow

FAMILY = Family(
    model_type="qwen2_moe",
    qkv_bias=True,
    window_switch="use_sliding_window",
    moe=MoeRow(
        experts=("num_experts",),
        top_k="num_experts_per_tok",
        hidden="moe_intermediate_size",
        renormalise="norm_topk_prob",
        shared_hidden="shared_expert_intermediate_size",
        shared_gate=True,
        sparse_step=True,
    ),
)
