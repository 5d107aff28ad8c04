"""Tensor names of GLM-4.5 to 4.7, dots.llm1, Solar Open, EXAONE-MoE, Hunyuan 3: Llama's attention, DeepSeek experts."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import (
    JOIN,
    JOIN_OUTSIDE,
    LAST_NORM,
    NORMS,
    MtpNames,
    attention_rules,
    gated_rules,
    router_rules,
)
from jaxspec.checkpoint.names.tables.deepseek import DEEPSEEK, FFN

GLM = replace(DEEPSEEK, layer=(*NORMS, *attention_rules(), *FFN))
DENSE = (*NORMS, *attention_rules(), *gated_rules("ffn/", "mlp."))

TABLES = dict.fromkeys(("glm4_moe", "dots1", "solar_open"), GLM) | {
    "exaone_moe": replace(
        GLM,
        layer=(
            *DENSE,
            *router_rules("mlp.gate.weight", "mlp.e_score_correction_bias"),
            *gated_rules("ffn/shared/", "mlp.shared_experts."),
        ),
        mtp=MtpNames(shared=JOIN_OUTSIDE, prefix="mtp.layers.{n}."),
        others=("mtp.",),
    ),
    "hy_v3": replace(
        GLM,
        layer=(
            *DENSE,
            *router_rules("mlp.router.gate.weight", "mlp.expert_bias"),
            *gated_rules("ffn/shared/", "mlp.shared_mlp."),
        ),
        mtp=MtpNames((*JOIN, LAST_NORM)),
        others=("model.layers.80.",),  # its multi-token prediction, after 80 layers
    ),
}
