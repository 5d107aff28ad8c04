"""Qwen3-Next and Qwen3.5: three gated delta nets to a gated attention, many small experts and a gated shared one."""

from dataclasses import replace

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.delta_net import DeltaNetRow
from jaxspec.models.mixers.gqa import FULL, GqaRow
from jaxspec.models.mixers.hybrid import LINEAR, HybridRow
from jaxspec.models.rows import MtpRow

ATTENTION = GqaRow(
    qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head", norm_offset=1.0, gated=True, windows="never"
)
EXPERTS = MoeRow(
    experts=("num_experts", "num_local_experts"),
    renormalize="norm_topk_prob",
    shared_hidden="shared_expert_intermediate_size",
    shared_gate=True,
    sparse_step=True,
)
NEXT = Family(
    model_type="qwen3_next",
    mixer=HybridRow({LINEAR: DeltaNetRow(grouped=True), FULL: ATTENTION}, interval="full_attention_interval"),
    moe=EXPERTS,
    norm_offset=1.0,
    mtp=MtpRow(ffn="experts", like=FULL),
    # Configs need not say that there is a layer of multi-token prediction.
    defaults={"partial_rotary_factor": 0.25, "norm_topk_prob": True, "num_nextn_predict_layers": 1},
    implied={"attn_output_gate": True},
)
LATER = replace(
    NEXT,
    model_type="qwen3_5_moe_text",
    mixer=HybridRow({LINEAR: DeltaNetRow(), FULL: ATTENTION}, interval="full_attention_interval"),
    moe=replace(EXPERTS, renormalize=True, sparse_step=False),
    mtp=MtpRow(("mtp_num_hidden_layers",), "experts", like=FULL),
    defaults={"partial_rotary_factor": 0.25},
    implied={"attn_output_gate": True, "mrope_interleaved": (True, False), "mtp_use_dedicated_embeddings": False},
)
FAMILIES = (NEXT, LATER, replace(LATER, model_type="qwen3_5_moe", inside="text_config"))
