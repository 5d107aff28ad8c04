"""Tensor names of Mistral 4, also inside of Mistral 3's wrapper: DeepSeek's, but all experts of a layer together."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import NameRule
from jaxspec.checkpoint.names.tables.deepseek import KIMI_INSIDE, NO_COPIES

TEXT = replace(
    NO_COPIES,
    expert=(
        NameRule("ffn/gate_up_D2F_{e}", ("mlp.experts.gate_up_proj",), "halves"),
        NameRule("ffn/down_FD_{e}", ("mlp.experts.down_proj",), "transpose"),
    ),
    experts_stacked=True,
)
TABLES = {
    "mistral4": TEXT,
    "mistral3": replace(
        TEXT, top=KIMI_INSIDE.top, prefix=KIMI_INSIDE.prefix, others=("vision_tower.", "multi_modal_projector.")
    ),
}
