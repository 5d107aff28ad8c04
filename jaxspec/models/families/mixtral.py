"""Mixtral: every layer has experts, two of eight per token, their weights renormalised; no shared expert."""

from jaxspec.models.family import Family, MoeRow

FAMILY = Family(
    model_type="mixtral",
    moe=MoeRow(experts=("num_local_experts",), top_k="num_experts_per_tok", hidden="intermediate_size"),
)
