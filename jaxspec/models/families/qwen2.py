"""Qwen2 and Qwen2.5: dense layers with biased queries, keys and values, small ones with tied heads."""

from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="qwen2",
    mixer=GqaRow(qkv_bias=True, window_switch="use_sliding_window", window_from="max_window_layers"),
)
