"""Phi-3.5-MoE: layer norms, biases of attention and head, LongRoPE, and two experts chosen one after the other."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="phimoe",
    mixer=GqaRow(qkv_bias="attention_bias", out_bias="attention_bias"),
    moe=MoeRow(
        experts=("num_local_experts",),
        hidden="intermediate_size",
        router="sparse_mixer",
        jitter="router_jitter_noise",
    ),
    norm="layer",
    head_bias="lm_head_bias",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2},
)
