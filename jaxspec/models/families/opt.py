"""OPT: learned positions, layer norms, biases everywhere, plain two-product feed-forward layers, tied heads."""

from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import GqaRow
from jaxspec.models.rows import FfnRow

FAMILY = Family(
    model_type="opt",
    mixer=GqaRow(qkv_bias="enable_bias", out_bias="enable_bias", rope=False, windows="none"),
    ffn=FfnRow(hidden="ffn_dim", activation="activation_function", gated=False, bias="enable_bias"),
    norm="layer",
    norm_eps="layer_norm_eps",
    norm_first="do_layer_norm_before",
    final_norm="_remove_final_layer_norm",
    learned_positions=True,
    embed_dim="word_embed_proj_dim",
    defaults={
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    implied={"layer_norm_elementwise_affine": True},
)
