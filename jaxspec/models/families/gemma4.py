"""Gemma 4: windows and full layers with other heads, norms around every part, experts beside a dense layer."""

from dataclasses import replace

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import FULL, NEAR
from jaxspec.models.mixers.two_sizes import TwoSizesRow
from jaxspec.models.rows import FfnRow, JoinRow, ScaleRow

ROPE = {
    NEAR: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
TEXT = Family(
    model_type="gemma4_text",
    mixer=TwoSizesRow(),
    ffn=FfnRow(activation="hidden_activation"),
    moe=MoeRow(
        experts=("num_experts",),
        top_k="top_k_experts",
        shared_hidden="intermediate_size",
        apart=True,
        switch="enable_moe_block",
    ),
    joins=dict.fromkeys(("attention", "ffn"), JoinRow(out_norm=True)),
    scales=ScaleRow(cap="final_logit_softcapping", root=True),
    scaled=True,
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
    },
    implied={"use_bidirectional_attention": "vision", "use_double_wide_mlp": (True, False)},
)
FAMILIES = (TEXT, replace(TEXT, model_type="gemma4", inside="text_config"))
