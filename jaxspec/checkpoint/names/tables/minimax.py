"""Tensor names of MiniMax-01: Mixtral's, and of lightning attention."""

from dataclasses import replace

from jaxspec.checkpoint.names.table import NameRule
from jaxspec.checkpoint.names.tables.mixtral import TABLES as MIXTRAL

A, HUB, TABLE = "attention/", "self_attn.", MIXTRAL["mixtral"]
# Decays of the chunks of a prompt, which follow from the config.
COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")

TABLES = {
    "minimax": replace(
        TABLE,
        layer=(
            *TABLE.layer,
            NameRule(f"{A}qkv_DHX", (f"{HUB}qkv_proj.weight",), "from_rank"),
            NameRule(f"{A}gate_DX", (f"{HUB}output_gate.weight",), "transpose"),
            NameRule(f"{A}out_norm_X", (f"{HUB}norm.weight",)),
            NameRule(f"{A}mix_out_XD", (f"{HUB}out_proj.weight",), "transpose"),
        ),
        ignored=(*TABLE.ignored, *COMPUTED),
    )
}
