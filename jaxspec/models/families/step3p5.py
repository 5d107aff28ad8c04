"""Step-3.5-Flash, and the text model inside of Step 3.7: windowed layers with more heads, gates, bounded experts."""

from dataclasses import replace

from jaxspec.models.arch import MtpForm
from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.by_layer import ByLayerRow
from jaxspec.models.mixers.gqa import GqaRow
from jaxspec.models.rows import FfnRow, MtpRow

ATTENTION = GqaRow(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head",
    norm_offset=1.0,
    windows="none",
    kv_heads=("num_attention_groups", "num_key_value_heads"),
    gate="use_head_wise_attn_gate",
    gate_function="sigmoid",
)
FIRST_DENSE, MOST_LAYERS = 3, 1000
STEP = Family(
    model_type="step3p5",
    mixer=ByLayerRow(ATTENTION),
    ffn=FfnRow(limit="swiglu_limits_shared", late=True),
    moe=MoeRow(
        experts=("moe_num_experts", "n_routed_experts"),
        top_k=("moe_top_k", "num_experts_per_tok"),
        router="sigmoid",
        scale="moe_router_scaling_factor",
        choice_bias=True,
        exact=True,
        shared_hidden="share_expert_dim",
        limit="swiglu_limits",
        shared_limit="swiglu_limits_shared",
        late=True,
        listed=("moe_layers_enum", "moe_every_n_layer"),
    ),
    mtp=MtpRow(ffn="dense", listed="layer_types", form=MtpForm(stream=True, own_heads=True)),
    norm_offset=1.0,
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "use_head_wise_attn_gate": True,
        "moe_layers_enum": tuple(range(FIRST_DENSE, MOST_LAYERS)),
        "rope_theta": 1e4,
    },
    implied={
        "use_qk_norm": True,
        "zero_centered": True,
        "norm_expert_weight": True,
        "use_moe_router_bias": True,
        "moe_router_activation": "sigmoid",
        "need_fp32_gate": True,
        "layer_types": ...,
        "sliding_window": ...,  # of layers that are all full where no list says otherwise
    },
)
FAMILIES = (STEP, replace(STEP, model_type="step3p7", inside="text_config"))
