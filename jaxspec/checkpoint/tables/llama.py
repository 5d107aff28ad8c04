"""Tensor names of Llama, and of every dense family that kept them."""

from jaxspec.checkpoint.table import EMBEDDING, Table, attention_rules, gated_rules

TABLES = dict.fromkeys(
    ("llama", "qwen3"),
    Table(top=EMBEDDING, attention=attention_rules(), dense=gated_rules("layers_{y}/ffn/", "model.layers.{y}.mlp.")),
)
