"""Ling 3: delta attention with bounded decays to one latent attention whose heads are gated, experts in groups."""

from dataclasses import replace

from jaxspec.models.families.deepseek_v3 import DEEPSEEK_MOE
from jaxspec.models.family import Family
from jaxspec.models.mixers.gqa import FULL
from jaxspec.models.mixers.hybrid import LINEAR, HybridRow
from jaxspec.models.mixers.latent import LatentRow
from jaxspec.models.mixers.recurrent import KdaRow
from jaxspec.models.rows import MtpRow

FAMILY = Family(
    model_type="bailing_hybrid",
    mixer=HybridRow({LINEAR: KdaRow(), FULL: LatentRow(gated=True)}, interval="layer_group_size"),
    moe=replace(
        DEEPSEEK_MOE,
        experts=("num_experts",),
        top_k=("num_experts_per_tok", "num_experts_per_token"),
        renormalize=("norm_topk_prob", "moe_renormalize"),
        shared_count="num_shared_experts",
        groups=(("n_group", "num_expert_group"), "topk_group"),
    ),
    mtp=MtpRow(ffn="experts", like=FULL),
    longest=("max_position_embeddings", "model_max_length"),
    defaults={
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,  # as in transformers
    },
)
