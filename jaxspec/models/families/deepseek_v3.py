"""DeepSeek-V3, R1 and V3.1: latent attention, sigmoid router with a bias and groups, one shared expert, MTP."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.latent import LatentRow
from jaxspec.models.rows import MtpRow

DEEPSEEK_MOE = MoeRow(
    experts=("n_routed_experts",),
    router="sigmoid",
    renormalize="norm_topk_prob",
    scale="routed_scaling_factor",
    choice_bias=True,
    grouped=True,
    exact=True,
    shared_hidden="moe_intermediate_size",
    shared_count="n_shared_experts",
    first_dense="first_k_dense_replace",
)

FAMILY = Family(
    model_type="deepseek_v3",
    mixer=LatentRow(),
    moe=DEEPSEEK_MOE,
    mtp=MtpRow(),
    defaults={
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
)
