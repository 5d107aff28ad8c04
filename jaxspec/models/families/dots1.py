"""dots.llm1: normalized queries and keys, windows in the last layers, the experts of DeepSeek-V3."""

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="dots1",
    mixer=GqaRow(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", window_from="max_window_layers"),
    moe=DEEPSEEK_MOE,
    defaults={"sliding_window": 4096, "max_window_layers": 62, "first_k_dense_replace": 0, "norm_topk_prob": False},
    implied={"scoring_func": ("sigmoid", "noaux_tc")},
)
