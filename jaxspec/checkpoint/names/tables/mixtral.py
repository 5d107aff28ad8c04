"""Tensor names of Mixtral and MiniMax-M2: w1 is the gate, w3 the up and w2 the down projection."""

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, Table, attention_rules, gated_rules, router_rules

MOE = "block_sparse_moe."

TABLES = dict.fromkeys(
    ("mixtral", "minimax_m2"),
    Table(
        top=EMBEDDING,
        layer=(
            *NORMS,
            *attention_rules(),
            *router_rules(f"{MOE}gate.weight", f"{MOE}e_score_correction_bias"),
        ),
        expert=gated_rules("ffn/", MOE + "experts.{e}.", "w1", "w3", "w2"),
    ),
)
