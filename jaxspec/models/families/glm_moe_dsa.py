"""GLM-5 to 5.3: DeepSeek-V3.2 with interleaved indexers, whose selections later layers may share."""

from dataclasses import replace

from jaxspec.models.families import deepseek_v3
from jaxspec.models.mixers.latent import LatentRow

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="glm_moe_dsa",
    mixer=LatentRow(indexed=True, index_interleaved=True, index_sharing=True),
    defaults={**deepseek_v3.FAMILY.defaults, "rms_norm_eps": 1e-5},
    implied={"layer_types": "indexed_attention"},
)
