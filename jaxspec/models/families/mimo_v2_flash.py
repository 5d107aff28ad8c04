"""MiMo-V2-Flash: near layers with sinks and twice the key-value heads, narrow values, the experts of DeepSeek-V3."""

from dataclasses import replace

from jaxspec.models.arch import MtpForm
from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import FULL, NEAR, GqaRow
from jaxspec.models.mixers.hybrid import HybridRow
from jaxspec.models.rows import MtpRow

ATTENTION = GqaRow(
    qkv_bias="attention_bias",
    windows="never",
    sinks="add_full_attention_sink_bias",
    value_dim=("v_head_dim",),
    value_scale="attention_value_scale",
)
FAMILY = Family(
    model_type="mimo_v2_flash",
    mixer=HybridRow(
        {
            FULL: ATTENTION,
            NEAR: replace(
                ATTENTION,
                windows="all",
                reach="sliding_window_size",
                sinks="add_swa_attention_sink_bias",
                heads=("swa_num_attention_heads", "num_attention_heads"),
                kv_heads=("swa_num_key_value_heads",),
                kv_twice=True,
                head_dim=("swa_head_dim", "head_dim"),
                value_dim=("swa_v_head_dim", "v_head_dim"),
                theta="swa_rope_theta",
            ),
        },
        lists=("layer_types", "hybrid_layer_pattern"),
        names={0: FULL, 1: NEAR},
    ),
    moe=replace(DEEPSEEK_MOE, shared_hidden=None, shared_count=None, pattern="moe_layer_freq"),
    mtp=MtpRow(ffn="dense", like=NEAR, form=MtpForm(stream=True, chained=False)),
    norm_eps=("rms_norm_eps", "layernorm_epsilon"),
    defaults={
        "sliding_window": 129,
        "add_swa_attention_sink_bias": True,
        "attention_value_scale": 0.707,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
        "num_nextn_predict_layers": 3,  # configs need not say so
    },
    implied={"attention_chunk_size": ..., "n_shared_experts": 0},
)
