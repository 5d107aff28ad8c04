"""GLM-4.5, 4.6 and 4.7: half-rotated heads, maybe normalised, sigmoid router with a bias, one shared expert, MTP."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow

FAMILY = Family(
    model_type="glm4_moe",
    mixer=GqaRow(qkv_bias="attention_bias", qk_norm="head", qk_norm_switch="use_qk_norm"),
    moe=MoeRow(
        experts=("n_routed_experts",),
        router="sigmoid",
        renormalise="norm_topk_prob",
        scale="routed_scaling_factor",
        choice_bias=True,
        grouped=True,
        exact=True,
        shared_hidden="moe_intermediate_size",
        shared_count="n_shared_experts",
        first_dense="first_k_dense_replace",
    ),
    mtp="num_nextn_predict_layers",
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "norm_topk_prob": True},
)
