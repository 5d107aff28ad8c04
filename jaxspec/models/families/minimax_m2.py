"""MiniMax-M2: half-rotated heads, queries and keys normalized over all heads, sigmoid router with a bias."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="minimax_m2",
    mixer=GqaRow(qk_norm="full", windows="none"),
    moe=MoeRow(
        experts=("num_local_experts",), hidden="intermediate_size", router="sigmoid", choice_bias=True, exact=True
    ),
    defaults={"rope_theta": 5e6},
    implied={"qk_norm_type": "per_layer"},
)
