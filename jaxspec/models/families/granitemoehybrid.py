"""Granite 4: Mamba-2 and attention without positions, multipliers, small experts beside a shared one."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import FULL, GqaRow
from jaxspec.models.mixers.hybrid import LINEAR, HybridRow
from jaxspec.models.mixers.recurrent import MambaRow
from jaxspec.models.rows import JoinRow, ScaleRow

MAMBA = MambaRow(
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias",
    "mamba_proj_bias", grouped_norm=False,
)  # fmt: skip
ATTENTION = GqaRow(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    rope="position_embedding_type",
    windows="never",
    scale="attention_multiplier",
)
FAMILY = Family(
    model_type="granitemoehybrid",
    mixer=HybridRow({LINEAR: MAMBA, FULL: ATTENTION}, names={"mamba": LINEAR, "attention": FULL}),
    moe=MoeRow(
        experts=("num_local_experts",),
        hidden="intermediate_size",
        router="topk_softmax",
        shared_hidden="shared_intermediate_size",
    ),
    joins=dict.fromkeys(("attention", "ffn"), JoinRow(("residual_multiplier",))),
    scales=ScaleRow("embedding_multiplier", "logits_scaling"),
    defaults={"attention_multiplier": 1.0, "mamba_n_groups": 1},
)
