"""Kimi-K2, and the text model inside of K2.5: DeepSeek-V3's architecture with more experts and fewer heads."""

from dataclasses import replace

from jaxspec.models.families import deepseek_v3

FAMILIES = (
    replace(deepseek_v3.FAMILY, model_type="kimi_k2"),
    replace(deepseek_v3.FAMILY, model_type="kimi_k25", inside="text_config"),
)
