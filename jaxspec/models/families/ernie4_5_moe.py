"""ERNIE-4.5: heads that turn in neighboring pairs, softmax router with a bias, dense layers at both ends."""

from jaxspec.models.family import Family, MoeRow
from jaxspec.models.mixers.gqa import GqaRow
from jaxspec.models.rows import MtpRow

FAMILY = Family(
    model_type="ernie4_5_moe",
    mixer=GqaRow(interleaved=True, windows="never"),
    moe=MoeRow(
        experts=("moe_num_experts",),
        top_k="moe_k",
        choice_bias=True,
        exact=True,
        shared_hidden="moe_intermediate_size",
        shared_count="moe_num_shared_experts",
        span=("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    ),
    mtp=MtpRow(ffn="dense", most=1),
    defaults={
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    # The least sum that weights are divided by: so small that no sum of softmax scores comes close.
    implied={"moe_use_aux_free": True, "moe_norm_min": 1e-12, "moe_gate": "topk"},
)
