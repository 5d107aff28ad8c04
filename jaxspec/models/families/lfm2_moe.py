"""LFM2-MoE: short convolutions and normalized attention, sigmoid experts after a few dense layers."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import FULL, GqaRow
from jaxspec.models.mixers.hybrid import HybridRow
from jaxspec.models.mixers.recurrent import ShortConvRow

FAMILY = Family(
    model_type="lfm2_moe",
    mixer=HybridRow({"conv": ShortConvRow(), FULL: GqaRow(qk_norm="head", windows="never")}),
    moe=MoeRow(
        experts=("num_experts",),
        router="sigmoid",
        renormalize="norm_topk_prob",
        scale="routed_scaling_factor",
        choice_bias=True,
        exact=True,
        first_dense="num_dense_layers",
        floor=1e-6,
    ),
    norm_eps="norm_eps",
    tied=("tie_word_embeddings", "tie_embedding"),
    defaults={"norm_topk_prob": True, "num_dense_layers": 2, "norm_eps": 1e-5, "rope_theta": 1e6},
    implied={"use_expert_bias": True},
)
