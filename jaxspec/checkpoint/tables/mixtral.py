"""Tensor names of Mixtral: w1 is the gate, w3 the up and w2 the down projection."""

from jaxspec.checkpoint.table import EMBEDDING, Rule, Table, attention_rules, gated_rules

MOE = "model.layers.{y}.block_sparse_moe."

TABLES = {
    "mixtral": Table(
        top=EMBEDDING,
        attention=attention_rules(),
        dense=(),
        moe=(Rule("layers_{y}/ffn/router_DE", (MOE + "gate.weight",), "transpose"),),
        expert=gated_rules("layers_{y}/ffn/", MOE + "experts.{e}.", "w1", "w3", "w2"),
    )
}
