"""Mixtral: every layer has experts, two of eight per token, their weights renormalized; no shared expert."""

from jaxspec.models.family import Family, MoeRow

FAMILY = Family(
    model_type="mixtral",
    moe=MoeRow(experts=("num_local_experts",), hidden="intermediate_size"),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
