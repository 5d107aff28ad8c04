"""DeepSeek-V4: compressed attention, hyper-connections, experts by token id and then by score, MTP."""

from jaxspec.models.arch import MtpForm
from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.compressed import CompressedRow
from jaxspec.models.rows import HyperRow, MtpRow

FAMILY = Family(
    model_type="deepseek_v4",
    mixer=CompressedRow(),
    moe=MoeRow(
        experts=("n_routed_experts",),
        router="sqrt_softplus",
        renormalize="norm_topk_prob",
        scale="routed_scaling_factor",
        choice_bias=True,
        exact=True,
        hash_layers="num_hash_layers",
        shared_hidden="moe_intermediate_size",
        shared_count="n_shared_experts",
        limit="swiglu_limit",
    ),
    hyper=HyperRow("hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    mtp=MtpRow(form=MtpForm(stream=True)),
    defaults={
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "num_hash_layers": 3,
    },
)
