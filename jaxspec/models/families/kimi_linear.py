"""Kimi-Linear: three layers of delta attention to one of latent attention without positions, DeepSeek-V3's experts."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import FULL
from jaxspec.models.mixers.hybrid import LINEAR, HybridRow
from jaxspec.models.mixers.latent import LatentRow
from jaxspec.models.mixers.recurrent import KdaRow

FAMILY = Family(
    model_type="kimi_linear",
    mixer=HybridRow(
        {LINEAR: KdaRow(nested=True), FULL: LatentRow(rotates=False)},
        numbered=("linear_attn_config", "full_attn_layers"),
    ),
    moe=replace(
        DEEPSEEK_MOE,
        experts=("num_experts",),
        top_k="num_experts_per_token",
        renormalize="moe_renormalize",
        shared_count="num_shared_experts",
        groups=(("num_expert_group",), "topk_group"),
    ),
    longest="model_max_length",
    defaults={"moe_renormalize": True, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
    implied={
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "use_grouped_topk": True,
        "linear_conv_kernel_dim": (2, 3, 4),
    },
)
