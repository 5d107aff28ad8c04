"""Nemotron-H and Nemotron 3: every layer is Mamba-2, attention without positions, experts, or a dense feed-forward."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import FULL, GqaRow
from jaxspec.models.mixers.hybrid import DENSE, LINEAR, ROUTED, HybridRow, NoMixerRow
from jaxspec.models.mixers.recurrent import MambaRow
from jaxspec.models.rows import FfnRow, MtpRow

MAMBA = MambaRow(
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias",
    grouped_norm=True,
)  # fmt: skip
ATTENTION = GqaRow(qkv_bias="attention_bias", out_bias="attention_bias", rope=False, windows="never")
FAMILY = Family(
    model_type="nemotron_h",
    mixer=HybridRow(
        {LINEAR: MAMBA, FULL: ATTENTION, ROUTED: NoMixerRow(), DENSE: NoMixerRow()},
        lists=("layers_block_type", "hybrid_override_pattern"),
        names={"M": LINEAR, "*": FULL, "E": ROUTED, "-": DENSE, "mamba": LINEAR, "attention": FULL},
    ),
    ffn=FfnRow(activation="mlp_hidden_act", gated=False, bias="mlp_bias"),
    moe=MoeRow(
        experts=("n_routed_experts",),
        router="sigmoid",
        renormalize="norm_topk_prob",
        scale="routed_scaling_factor",
        choice_bias=True,
        grouped=True,
        exact=True,
        shared_hidden="moe_shared_expert_intermediate_size",
        gated=False,
        latent="moe_latent_size",
    ),
    mtp=MtpRow(ffn="experts", like=FULL, most=1),
    norm_eps=("layer_norm_epsilon", "norm_eps"),
    one_each=True,
    defaults={"mlp_hidden_act": "relu2", "norm_topk_prob": True, "layer_norm_epsilon": 1e-5},
    implied={
        "n_shared_experts": 1,
        "partial_rotary_factor": 1,
        "mtp_hybrid_override_pattern": "*E",
        "mtp_layers_block_type": ("full_attention", "attention", "moe"),
    },
)
