"""DeepSeek-V2 and V2-Lite: latent attention, softmax router whose groups are chosen by their best member."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.latent import LatentRow

FAMILY = Family(
    model_type="deepseek_v2",
    mixer=LatentRow(),
    moe=replace(DEEPSEEK_MOE, router="softmax", renormalize=False, choice_bias=False, grouped="topk_method", members=1),
    defaults={"first_k_dense_replace": 0, "n_shared_experts": 2},
)
