"""Solar Open: the experts of DeepSeek-V3 in every layer, heads that are not normalized."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="solar_open",
    mixer=GqaRow(qkv_bias="attention_bias", windows="never"),
    moe=replace(DEEPSEEK_MOE, first_dense=None),
    defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 1e6},
)
