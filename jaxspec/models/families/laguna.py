"""Laguna: full and near layers with heads of their own numbers, gated, and sigmoid experts with capped logits."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import FULL, NEAR, GqaRow

FAMILY = Family(
    model_type="laguna",
    mixer=GqaRow(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        windows="none",
        heads=("num_attention_heads_per_layer", "num_attention_heads"),
        gate="gating",
    ),
    moe=MoeRow(
        experts=("num_experts",),
        router="sigmoid",
        scale="moe_routed_scaling_factor",
        choice_bias=True,
        exact=True,
        shared_hidden="shared_expert_intermediate_size",
        sparse_step=True,
        first_dense="first_k_dense_replace",
        soft_cap="moe_router_logit_softcapping",
    ),
    defaults={
        "head_dim": 128,
        "sliding_window": 512,
        "gating": True,
        "first_k_dense_replace": 1,
        "moe_routed_scaling_factor": 1.0,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            NEAR: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    implied={"sliding_window": ...},  # of layers that are all full where no list says otherwise
)
