"""Mellum 2: Qwen3-MoE's experts, windowed and full layers that turn by bases of their own."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import FULL, NEAR, GqaRow
from jaxspec.models.rows import MtpRow

FAMILY = Family(
    model_type="mellum",
    mixer=GqaRow(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", windows="none"),
    moe=MoeRow(
        experts=("num_experts", "num_local_experts"), renormalize="norm_topk_prob", first_dense="first_k_dense_replace"
    ),
    mtp=MtpRow(ffn="experts", like=NEAR, most=1),
    defaults={
        "head_dim": 128,
        "norm_topk_prob": True,
        "sliding_window": 1024,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e5},
            NEAR: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    implied={
        "sliding_window": ...,  # of layers that are all full where no list says otherwise
        "mtp_layer_types": NEAR,
        "mtp_mlp_layer_types": "sparse",
    },
)
