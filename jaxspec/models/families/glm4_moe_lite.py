"""GLM-4.7-Flash: DeepSeek-V3's architecture with one group of experts and one dense layer."""

from dataclasses import replace

from jaxspec.models.families import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    defaults={
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
    },
)
