"""Tensor names of Llama 4: all experts of a layer in one tensor, whose columns are those of gates, then of ups."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, NameRule, Table, attention_rules, gated_rules, router_rules

FFN, INSIDE = "feed_forward.", "language_model."
TEXT = Table(
    top=EMBEDDING,
    layer=(
        *NORMS,
        *attention_rules(),
        *gated_rules("ffn/", FFN),
        *router_rules(FFN + "router.weight"),
        *gated_rules("ffn/shared/", FFN + "shared_expert."),
    ),
    expert=(
        NameRule("ffn/gate_up_D2F_{e}", (FFN + "experts.gate_up_proj",), "columns"),
        NameRule("ffn/down_FD_{e}", (FFN + "experts.down_proj",)),
    ),
    experts_stacked=True,
)

TABLES = {
    "llama4_text": TEXT,
    "llama4": replace(
        TEXT,
        top=tuple(replace(rule, hub=(INSIDE + rule.hub[0],)) for rule in EMBEDDING),
        prefix=INSIDE + TEXT.prefix,
        others=("vision_model.", "multi_modal_projector."),
    ),
}
