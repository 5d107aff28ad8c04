"""DeepSeek-V3.2: V3 with an indexer in every layer."""

from dataclasses import replace

from jaxspec.models.families import deepseek_v3
from jaxspec.models.mixers.latent import LatentRow

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="deepseek_v32",
    mixer=LatentRow(indexed=True),
    implied={"layer_types": "indexed_attention"},
)
