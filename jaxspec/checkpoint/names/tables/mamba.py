"""Tensor names of Granite 3, of Granite 4 and Nemotron-H, whose recurrent layers are Mamba-2."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import (
    EMBEDDING,
    JOIN,
    NORMS,
    MtpNames,
    NameRule,
    Table,
    attention_rules,
    router_rules,
)

A, MOE, MIXER = "attention/", "block_sparse_moe.", "mixer."


def mamba_rules(hub: str) -> tuple[NameRule, ...]:
    """Returns the rules of Mamba-2 with every optional part."""
    return (
        NameRule(f"{A}in_DX", (f"{hub}in_proj.weight",), "transpose"),
        NameRule(f"{A}in_bias_X", (f"{hub}in_proj.bias",)),
        NameRule(f"{A}conv_X1K", (f"{hub}conv1d.weight",)),
        NameRule(f"{A}conv_bias_X", (f"{hub}conv1d.bias",)),
        NameRule(f"{A}decay_H", (f"{hub}A_log",)),
        NameRule(f"{A}decay_bias_H", (f"{hub}dt_bias",)),
        NameRule(f"{A}skip_H", (f"{hub}D",)),
        NameRule(f"{A}out_norm_X", (f"{hub}norm.weight",)),
        NameRule(f"{A}mix_out_XD", (f"{hub}out_proj.weight",), "transpose"),
        NameRule(f"{A}mix_out_bias_D", (f"{hub}out_proj.bias",)),
    )


def _up_down(leaf: str, hub: str) -> tuple[NameRule, ...]:
    return (
        NameRule(f"{leaf}up_DF", (f"{hub}up_proj.weight",), "transpose"),
        NameRule(f"{leaf}up_bias_F", (f"{hub}up_proj.bias",)),
        NameRule(f"{leaf}down_FD", (f"{hub}down_proj.weight",), "transpose"),
        NameRule(f"{leaf}down_bias_D", (f"{hub}down_proj.bias",)),
    )


def nemotron_rules(first: str, second: str) -> tuple[NameRule, ...]:
    """Returns the rules of a layer of Nemotron-H by the prefixes of what mixes positions and of its feed-forward."""
    mixer, ffn = first + MIXER, second + MIXER
    return (
        NameRule("attention_norm_D", (f"{first}norm.weight",)),
        NameRule("ffn_norm_D", (f"{second}norm.weight",)),
        *attention_rules(mixer),
        *mamba_rules(mixer),
        *router_rules(f"{ffn}gate.weight", f"{ffn}gate.e_score_correction_bias"),
        NameRule("ffn/latent_in_DR", (f"{ffn}fc1_latent_proj.weight",), "transpose"),
        NameRule("ffn/latent_out_RD", (f"{ffn}fc2_latent_proj.weight",), "transpose"),
        *_up_down("ffn/", ffn),
        *_up_down("ffn/shared/", f"{ffn}shared_experts."),
    )


def nemotron_expert(prefix: str) -> tuple[NameRule, ...]:
    """Returns the rules of an expert of Nemotron-H by the prefix of its layer."""
    return (
        NameRule("ffn/gate_up_D2F_{e}", (prefix + MIXER + "experts.{e}.up_proj.weight",), "gate_up"),
        NameRule("ffn/down_FD_{e}", (prefix + MIXER + "experts.{e}.down_proj.weight",), "transpose"),
    )


GRANITE = dict.fromkeys(
    ("granitemoe", "granitemoeshared", "granitemoehybrid"),
    Table(
        top=EMBEDDING,
        layer=(
            *NORMS,
            *attention_rules(),
            *mamba_rules("mamba."),
            *router_rules(f"{MOE}router.layer.weight"),
            NameRule("ffn/shared/gate_up_D2F", ("shared_mlp.input_linear.weight",), "halves"),
            NameRule("ffn/shared/down_FD", ("shared_mlp.output_linear.weight",), "transpose"),
        ),
        expert=(
            NameRule("ffn/gate_up_D2F_{e}", (f"{MOE}input_linear.weight",), "halves"),
            NameRule("ffn/down_FD_{e}", (f"{MOE}output_linear.weight",), "transpose"),
        ),
        experts_stacked=True,
    ),
)

TABLES = GRANITE | {
    "nemotron_h": Table(
        top=(
            NameRule("embed_VD", ("backbone.embeddings.weight",)),
            NameRule("norm_D", ("backbone.norm_f.weight",)),
            *EMBEDDING[2:],
        ),
        layer=nemotron_rules("", ""),
        expert=nemotron_expert(""),
        # Attention and experts of a layer of prediction have numbers of their own.
        mtp=MtpNames(
            (
                *(replace(rule, hub=(f"0.{rule.hub[0]}",)) for rule in JOIN),
                NameRule("norm_D", ("1.final_layernorm.weight",)),
            ),
            prefix="mtp.layers.",
            layer=nemotron_rules("0.", "1."),
            expert=nemotron_expert("1."),
        ),
        prefix="backbone.layers.{y}.",
        others=("mtp.",),
    ),
}
