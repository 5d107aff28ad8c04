"""Tensor names of Kimi-Linear and of Ling 3: delta attention beside latent attention."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import (
    EMBEDDING,
    JOIN,
    LAST_NORM,
    NORMS,
    MtpNames,
    NameRule,
    Table,
    gated_rules,
    router_rules,
)
from jaxspec.checkpoint.names.tables.deepseek import LATENT

A, KIMI, LING, MOE = "attention/", "self_attn.", "attention.", "block_sparse_moe."
PRODUCTS = {
    "strength_DH": "b", "drift_DX": "f", "drift_a_DR": "f_a", "drift_b_RX": "f_b", "gate_DX": "g", "gate_a_DR": "g_a",
    "gate_b_RX": "g_b",
}  # fmt: skip


def kda_rules(hub: str, out: str) -> tuple[NameRule, ...]:
    """Returns the rules of delta attention with every optional part, but for its decays."""
    return (
        NameRule(f"{A}qkv_D3X", tuple(f"{hub}{n}_proj.weight" for n in "qkv"), "gate_up"),
        NameRule(f"{A}conv_3X1K", tuple(f"{hub}{n}_conv1d.weight" for n in "qkv"), "each"),
        *(NameRule(A + leaf, (f"{hub}{name}_proj.weight",), "transpose") for leaf, name in PRODUCTS.items()),
        NameRule(f"{A}decay_bias_X", (f"{hub}dt_bias",)),
        NameRule(f"{A}out_norm_C", (f"{hub}o_norm.weight",)),
        NameRule(f"{A}state_out_HCD", (f"{hub}{out}.weight",), "out"),
    )


LING_LATENT = tuple(
    replace(rule, hub=tuple(name.replace(KIMI, LING).replace("o_proj", "dense") for name in rule.hub))
    for rule in LATENT
)

TABLES = {
    "kimi_linear": Table(
        top=EMBEDDING,
        layer=(
            *NORMS,
            *LATENT,
            *kda_rules(KIMI, "o_proj"),
            NameRule(f"{A}decay_H", (f"{KIMI}A_log",), "per_head"),
            *gated_rules("ffn/", "mlp."),
            *router_rules(f"{MOE}gate.weight", f"{MOE}gate.e_score_correction_bias"),
            *gated_rules("ffn/shared/", f"{MOE}shared_experts."),
        ),
        expert=gated_rules("ffn/", MOE + "experts.{e}.", "w1", "w3", "w2"),
    ),
    "bailing_hybrid": Table(
        top=(NameRule("embed_VD", ("model.word_embeddings.weight",)), *EMBEDDING[1:]),
        layer=(
            *NORMS,
            *LING_LATENT,
            *kda_rules(LING, "dense"),
            NameRule(f"{A}decay_H", (f"{LING}A_log",)),
            NameRule(f"{A}head_gate_DH", (f"{LING}g_proj.weight",), "transpose"),
            *gated_rules("ffn/", "mlp."),
            *router_rules("mlp.gate.weight", "mlp.gate.expert_bias"),
            *gated_rules("ffn/shared/", "mlp.shared_experts."),
        ),
        expert=gated_rules("ffn/", "mlp.experts.{e}."),
        mtp=MtpNames((*JOIN, LAST_NORM)),
    ),
}
