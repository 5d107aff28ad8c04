"""gpt-oss: sinks, alternating windows, biases everywhere, experts with an activation of their own."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
FAMILY = Family(
    model_type="gpt_oss",
    mixer=GqaRow(qkv_bias="attention_bias", out_bias="attention_bias", alternating=True, sinks=True),
    moe=MoeRow(
        experts=("num_local_experts",),
        top_k="num_experts_per_tok",
        hidden="intermediate_size",
        router="topk_softmax",
        logit_bias=True,
        activation="swigluoai",
        limit="swiglu_limit",
        bias=True,
    ),
    defaults={
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "head_dim": 64,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_parameters": YARN,
    },
    implied={"swiglu_alpha": 1.702},
)
