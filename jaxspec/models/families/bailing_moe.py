"""Ling 1 and 2, and Sarvam-30B: ordinary heads, and experts of a softmax or DeepSeek-V3's, as the config says."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow
from jaxspec.models.rows import MtpRow

LING = Family(
    model_type="bailing_moe",
    mixer=GqaRow(
        qkv_bias="use_qkv_bias", out_bias="use_bias", qk_norm="head", qk_norm_switch="use_qk_norm", windows="never"
    ),
    moe=replace(
        DEEPSEEK_MOE,
        experts=("num_experts", "n_routed_experts"),
        router="softmax",
        score="score_function",
        choice_bias="moe_router_enable_expert_bias",
        shared_hidden=("moe_shared_expert_intermediate_size", "moe_intermediate_size"),
        shared_count=("num_shared_experts", "n_shared_experts"),
    ),
    mtp=MtpRow(),
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 0},
    implied={
        "norm_head": False,
        "norm_softmax": False,
        "router_dtype": ("fp32", "bf16"),
        "moe_router_topk_scaling_factor": 1,
    },
)
FAMILIES = (
    LING,
    replace(
        LING,
        model_type="sarvam_moe",
        defaults={
            **LING.defaults,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "head_dim": 64,
            "rope_theta": 8e6,
        },
    ),
)
