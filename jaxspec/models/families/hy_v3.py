"""Hunyuan 3: normalized queries and keys, sigmoid experts beside a shared one, their weights always renormalized."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow
from jaxspec.models.rows import MtpRow

FAMILY = Family(
    model_type="hy_v3",
    mixer=GqaRow(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", windows="never"),
    moe=replace(
        DEEPSEEK_MOE,
        experts=("num_experts",),
        renormalize=True,
        scale="router_scaling_factor",
        grouped=False,
        shared_count="num_shared_experts",
    ),
    mtp=MtpRow(ffn="experts"),
    defaults={
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "rope_theta": 11158840.0,
    },
    implied={"enable_moe_fp32_combine": (True, False)},
)
