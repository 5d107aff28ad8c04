"""Llama 4: attention within chunks, full layers without positions, one expert that reads its input times its weight."""

from dataclasses import replace

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.chunked import ChunkedRow
from jaxspec.models.rows import FfnRow

TEXT = Family(
    model_type="llama4_text",
    mixer=ChunkedRow(),
    ffn=FfnRow(hidden="intermediate_size_mlp"),
    moe=MoeRow(
        experts=("num_local_experts",),
        hidden="intermediate_size",
        router="sigmoid",
        renormalize=False,
        shared_hidden="intermediate_size",
        listed=("moe_layers", "interleave_moe_layer_step"),
        weighs_input=True,
    ),
    defaults={"num_experts_per_tok": 1, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "head_dim": 128},
)
FAMILIES = (TEXT, replace(TEXT, model_type="llama4", inside="text_config"))
