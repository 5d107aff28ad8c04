"""OLMoE: queries and keys normalized over all heads, every layer has experts whose weights are not renormalized."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="olmoe",
    mixer=GqaRow(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="full", windows="none"),
    moe=MoeRow(experts=("num_experts",), hidden="intermediate_size", renormalize="norm_topk_prob"),
    defaults={"rms_norm_eps": 1e-5},
)
