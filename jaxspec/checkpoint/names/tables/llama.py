"""Tensor names of Llama, and of every dense family that kept them."""

from jaxspec.checkpoint.names.table import EMBEDDING, NORMS, Table, attention_rules, gated_rules

TABLES = dict.fromkeys(
    ("llama", "qwen2", "qwen3"),
    Table(top=EMBEDDING, layer=(*NORMS, *attention_rules(), *gated_rules("ffn/", "mlp."))),
)
