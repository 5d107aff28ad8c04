"""Hunyuan-A13B: queries and keys normalized after rotation, renormalized softmax experts beside a shared one."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="hunyuan_v1_moe",
    mixer=GqaRow(
        qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", norm_turned=True, windows="never"
    ),
    moe=MoeRow(
        experts=("num_experts",),
        top_k=("moe_topk", "num_experts_per_tok"),
        hidden="intermediate_size",
        exact=True,
        shared_hidden="intermediate_size",
    ),
    defaults={"rms_norm_eps": 1e-5},
    implied={"num_shared_expert": 1, "norm_type": "rms", "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0},
)
