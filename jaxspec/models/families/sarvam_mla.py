"""Sarvam-105B: DeepSeek-V3's architecture, experts under other keys and no multi-token prediction."""

from dataclasses import replace

from jaxspec.models.families import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="sarvam_mla",
    moe=replace(
        deepseek_v3.DEEPSEEK_MOE,
        experts=("num_experts", "n_routed_experts"),
        shared_count=("num_shared_experts", "n_shared_experts"),
    ),
    mtp=None,
    defaults={**deepseek_v3.FAMILY.defaults, "first_k_dense_replace": 1},
)
