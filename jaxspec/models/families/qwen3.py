"""Qwen3: dense layers with normalized query and key heads."""

from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="qwen3",
    mixer=GqaRow(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        window_switch="use_sliding_window",
        window_from="max_window_layers",
    ),
    defaults={"sliding_window": 4096, "max_window_layers": 28},
)
