"""GLM-4.5, 4.6 and 4.7: half-rotated heads, maybe normalized; experts and MTP as in DeepSeek-V3."""

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow
from jaxspec.models.rows import MtpRow

FAMILY = Family(
    model_type="glm4_moe",
    mixer=GqaRow(qkv_bias="attention_bias", qk_norm="head", qk_norm_switch="use_qk_norm", windows="none"),
    moe=DEEPSEEK_MOE,
    mtp=MtpRow(),
    defaults={
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
)
