"""Mistral 4 alone and inside of Mistral 3's wrapper: latent attention, growing queries, softmax experts in groups."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.latent import LatentRow

TEXT = Family(
    model_type="mistral4",
    mixer=LatentRow(),
    moe=replace(DEEPSEEK_MOE, router="softmax", choice_bias=False, exact=False),
    defaults={"norm_topk_prob": True, "n_shared_experts": 1},
)
FAMILIES = (TEXT, replace(TEXT, model_type="mistral3", inside="text_config", text_type="mistral4"))
