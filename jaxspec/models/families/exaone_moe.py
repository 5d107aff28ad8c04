"""EXAONE-MoE: rotation in layers with a window alone, full layers without positions, the experts of DeepSeek-V3."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import FULL, NEAR, GqaRow
from jaxspec.models.mixers.hybrid import HybridRow
from jaxspec.models.rows import MtpRow

FAMILY = Family(
    model_type="exaone_moe",
    mixer=HybridRow(
        {NEAR: GqaRow(qk_norm="head"), FULL: GqaRow(qk_norm="head", rope=False, windows="never")},
        interval="sliding_window_pattern",
        other=NEAR,
    ),
    moe=replace(DEEPSEEK_MOE, experts=("num_experts",), shared_count="num_shared_experts"),
    mtp=MtpRow(ffn="dense", like=NEAR),
    defaults={
        "sliding_window": 4096,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
    },
    implied={"mtp_layer_types": "sliding_attention", "mtp_sliding_windows": ()},
)
