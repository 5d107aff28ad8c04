"""Qwen2 and Qwen2.5: dense layers with biased queries, keys and values, small ones with tied heads."""

from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="qwen2",
    mixer=GqaRow(qkv_bias=True, window_switch="use_sliding_window", window_from="max_window_layers"),
    defaults={"sliding_window": 4096, "max_window_layers": 28},
    implied={"qkv_bias": True, "attention_bias": (True, False)},  # the second is Llama's key, which Qwen2 leaves aside
)
