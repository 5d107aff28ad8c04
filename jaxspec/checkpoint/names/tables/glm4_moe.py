"""Tensor names of GLM-4.5 to 4.7: Llama's attention, DeepSeek-V3's experts and its multi-token prediction."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import NORMS, attention_rules
from jaxspec.checkpoint.names.tables.deepseek import DEEPSEEK, FFN

TABLES = {"glm4_moe": replace(DEEPSEEK, layer=(*NORMS, *attention_rules(), *FFN))}
