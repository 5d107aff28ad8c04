"""LongCat-Flash: two latent attentions and two dense layers around a shortcut of experts, some of which do nothing."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.latent import LatentRow
from jaxspec.models.rows import FfnRow, MtpRow

FAMILY = Family(
    model_type="longcat_flash",
    mixer=LatentRow(balanced=True),
    ffn=FfnRow(hidden="ffn_hidden_size"),
    moe=MoeRow(
        experts=("n_routed_experts",),
        top_k="moe_topk",
        hidden="expert_ffn_hidden_size",
        renormalize=False,
        scale="routed_scaling_factor",
        choice_bias=True,
        exact=True,
        shared_hidden="ffn_hidden_size",
        identities="zero_expert_num",
    ),
    mtp=MtpRow(ffn="dense", most=1),
    shortcut=True,
    depth="num_layers",
    # Configs need not say that there is a layer of multi-token prediction.
    defaults={
        "routed_scaling_factor": 6.0,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
    },
    implied={"zero_expert_type": "identity", "attention_method": "MLA"},
)
