"""MiniMax-01: lightning attention and attention; what a layer adds to is the normalized stream, both multiplied."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import FULL, GqaRow
from jaxspec.models.mixers.hybrid import LINEAR, HybridRow
from jaxspec.models.mixers.recurrent import LightningRow
from jaxspec.models.rows import JoinRow

FAMILY = Family(
    model_type="minimax",
    mixer=HybridRow({LINEAR: LightningRow(), FULL: GqaRow(windows="never")}),
    moe=MoeRow(experts=("num_local_experts",), hidden="intermediate_size"),
    joins={
        LINEAR: JoinRow(("linear_attn_beta_factor",), ("linear_attn_alpha_factor",), normed=True),
        FULL: JoinRow(("full_attn_beta_factor",), ("full_attn_alpha_factor",), normed=True),
        "ffn": JoinRow(("mlp_beta_factor",), ("mlp_alpha_factor",), normed=True),
    },
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
