"""Tensor names of Gemma 4: all experts of a layer in one tensor, beside the dense layer that every token reads."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import EMBEDDING, NameRule, Table, attention_rules, gated_rules

A, HUB, INSIDE = "attention/", "self_attn.", "model.language_model."
NORMS = {
    "attention_norm_D": "input_layernorm",
    "attention_out_norm_D": "post_attention_layernorm",
    "ffn_norm_D": "pre_feedforward_layernorm",
    "ffn_out_norm_D": "post_feedforward_layernorm",
    "ffn/shared_out_norm_D": "post_feedforward_layernorm_1",
    "ffn/routed_norm_D": "pre_feedforward_layernorm_2",
    "ffn/routed_out_norm_D": "post_feedforward_layernorm_2",
}
TEXT = Table(
    top=EMBEDDING,
    layer=(
        *(NameRule(leaf, (f"{name}.weight",)) for leaf, name in NORMS.items()),
        *attention_rules(),
        NameRule(f"{A}qk_DGQC", tuple(f"{HUB}{n}_proj.weight" for n in "qk"), "query_key"),
        NameRule(f"{A}qk_bias_GQC", tuple(f"{HUB}{n}_proj.bias" for n in "qk"), "query_key"),
        *gated_rules("ffn/", "mlp."),
        *gated_rules("ffn/shared/", "mlp."),
        NameRule("ffn/router_DE", ("router.proj.weight",), "transpose"),
        NameRule("ffn/router_scale_D", ("router.scale",)),
        NameRule("ffn/expert_scale_E", ("router.per_expert_scale",)),
        NameRule("layer_scale_X", ("layer_scalar",)),
    ),
    expert=(
        NameRule("ffn/gate_up_D2F_{e}", ("experts.gate_up_proj",), "halves"),
        NameRule("ffn/down_FD_{e}", ("experts.down_proj",), "transpose"),
    ),
    experts_stacked=True,
)

TABLES = {
    "gemma4_text": TEXT,
    "gemma4": replace(
        TEXT,
        top=tuple(replace(rule, hub=(rule.hub[0].replace("model.", INSIDE),)) for rule in EMBEDDING),
        prefix=INSIDE + "layers.{y}.",
        others=tuple(f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")),
    ),
}
