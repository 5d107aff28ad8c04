"""Tensor names of LongCat-Flash: numbers tell the two attentions, norms and dense layers of a layer apart."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, MtpNames, NameRule, Table, gated_rules, router_rules
from jaxspec.checkpoint.names.tables.deepseek import HUB, LATENT


def half_rules(number: int, path: str, dense: str) -> tuple[NameRule, ...]:
    """Returns the rules of one half of a layer.

    Args:
      number: of it.
      path: of its parameters.
      dense: path of its dense feed-forward in there.
    """
    attention = (
        replace(rule, leaf=path + rule.leaf, hub=tuple(name.replace(HUB, f"{HUB}{number}.") for name in rule.hub))
        for rule in LATENT
    )
    return (
        NameRule(f"{path}attention_norm_D", (f"input_layernorm.{number}.weight",)),
        NameRule(f"{path}ffn_norm_D", (f"post_attention_layernorm.{number}.weight",)),
        *attention,
        *gated_rules(path + dense, f"mlps.{number}."),
    )


TABLES = {
    "longcat_flash": Table(
        top=EMBEDDING,
        layer=(
            *half_rules(0, "", "ffn/shared/"),
            *half_rules(1, "second/", "ffn/"),
            *router_rules("mlp.router.classifier.weight", "mlp.router.e_score_correction_bias"),
        ),
        expert=gated_rules("ffn/", "mlp.experts.{e}."),
        mtp=MtpNames(
            (
                NameRule("embed_norm_D", ("enorm.m.weight",)),
                NameRule("hidden_norm_D", ("hnorm.m.weight",)),
                NameRule("join_XD", ("eh_proj.weight",), "transpose"),
            ),
            shared=(NameRule("norm_D", ("model.mtp.norm.weight",)),),
            prefix="model.mtp.layers.{n}.",
            layer=(*NORMS, *LATENT, *gated_rules("ffn/", "transformer_layer.mlp.")),
        ),
        others=("model.mtp.",),
    )
}
