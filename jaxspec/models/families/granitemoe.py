"""Granite 3: Granite 4's attention and experts in every layer, heads that turn, and no shared expert."""

from dataclasses import replace

from jaxspec.models.families import granitemoehybrid
from jaxspec.models.family import MoeRow

FAMILY = replace(
    granitemoehybrid.FAMILY,
    model_type="granitemoe",
    mixer=replace(granitemoehybrid.ATTENTION, rope=True),
    moe=MoeRow(experts=("num_local_experts",), hidden="intermediate_size", router="topk_softmax"),
    defaults={"attention_multiplier": 1.0},
)
