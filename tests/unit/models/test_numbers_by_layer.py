"""Numbers that differ by layer or by kind of layer: read from every way to write them, refused where they cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.checkpoint.heads.layers import rope_for_head
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.rope import RopeSpec

GOLDEN = Path(__file__).parents[2] / "golden"
HYBRID = ("layer_types", "mlp_layer_types", "hybrid_layer_pattern", "moe_layer_freq")


def read(name: str, drop: tuple[str, ...] = (), **changes: Any) -> ArchSpec:
    config = json.loads((GOLDEN / name / "config.json").read_text()) | changes
    return arch_of({key: value for key, value in config.items() if key not in drop})


def attention(arch: ArchSpec, layer: int) -> AttentionSpec:
    spec = arch.layers[layer].attention
    assert isinstance(spec, AttentionSpec)
    return spec


def test_heads_by_layer():
    assert [attention(read("laguna"), y).heads for y in range(2)] == [4, 6]
    alike = read("laguna", ("num_attention_heads_per_layer",))
    assert [attention(alike, y).heads for y in range(2)] == [4, 4]


@pytest.mark.parametrize(
    ("gating", "kind"), [(True, "head"), ("per-head", "head"), ("per-element", "channel"), (None, "head")]
)
def test_gates(gating: Any, kind: str):
    assert attention(read("laguna", gating=gating), 1).outer_gate == kind


def test_kinds_of_layers_by_lists_of_either_dialect():
    """MiMo's hub config says 0 and 1 where transformers says names."""
    hub = read("mimo_v2_flash", ("layer_types", "mlp_layer_types"))
    assert hub == read("mimo_v2_flash", ("hybrid_layer_pattern", "moe_layer_freq")) == read("mimo_v2_flash")
    assert [attention(hub, y).kv_heads for y in range(2)] == [1, 2]
    assert [attention(hub, y).sinks for y in range(2)] == [False, True]
    own = ("swa_num_key_value_heads", "swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim")
    assert read("mimo_v2_flash", own) == hub, "near layers have twice the key-value heads by default"
    assert attention(read("mimo_v2_flash", swa_num_key_value_heads=4), 1).kv_heads == 4


def test_windows_of_either_dialect():
    """``sliding_window_size`` leaves the query's own position out; with it ``sliding_window`` is not read."""
    assert attention(read("mimo_v2_flash"), 1).window == 7
    assert attention(read("mimo_v2_flash", sliding_window=7), 1).window == 7
    assert attention(read("mimo_v2_flash", ("sliding_window_size",), sliding_window=9), 1).window == 9


def test_dense_layers_by_their_numbers():
    listed = read("laguna", ("mlp_layer_types",), mlp_only_layers=[1])
    assert listed.expert_layers == (0,)
    assert read("laguna", ("mlp_layer_types",)).expert_layers == (1,)


def test_a_value_scale_of_null_is_none():
    assert attention(read("mimo_v2_flash", attention_value_scale=None), 0).value_scale == 1
    assert attention(read("mimo_v2_flash", ("attention_value_scale",)), 0).value_scale == 0.707


def test_the_original_context_of_longrope():
    """In longer texts other divisors hold for all positions, see test_text_length."""
    assert read("phimoe").max_position == 128
    assert read("phimoe", ("rope_scaling",)).max_position == 256


def test_heads_of_longrope_targets_turn_plainly():
    config = json.loads((GOLDEN / "phimoe" / "config.json").read_text())
    assert rope_for_head(config, 16) == RopeSpec(10000.0, 16)


WRONG = {
    "num_attention_heads_per_layer": ("laguna", [4], r"must state one number for each of 2 layers, got \[4\]"),
    "gating": ("laguna", "per-token", r"must be true, per-head or per-element, got 'per-token'"),
    "moe_router_logit_softcapping": ("laguna", -1.0, r"finite number of at least 0"),
    "moe_apply_router_weight_on_input": ("laguna", True, r"does not have moe_apply_router_weight_on_input"),
    "hybrid_layer_pattern": ("mimo_v2_flash", [0, 2], r"must name 0, 1, full_attention, sliding_attention for each"),
    "moe_layer_freq": ("mimo_v2_flash", [0], r"must say 0 \(dense\) or 1 \(sparse\) for each of the 2 layers"),
    "attention_value_scale": ("mimo_v2_flash", 0.0, r"finite number above 0"),
    "num_experts_per_tok": ("phimoe", 1, r"must be 2, which a sparse mixer chooses, got 1"),
    "router_jitter_noise": ("phimoe", "much", r"finite number above 0"),
}


@pytest.mark.parametrize("key", WRONG)
def test_values_that_cannot_be(key: str):
    name, value, says = WRONG[key]
    drop = HYBRID[:2] if key in HYBRID else ()
    with pytest.raises(ConfigError, match=says):
        read(name, drop, **{key: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"short_factor": [1.0, 1.1]}, r"short_factor must be 4 numbers, not 2"),
        ({"short_factor": [1.0, 1.1, 0, 1.2]}, r"short_factor must be a finite number above 0"),
        ({"short_factor": 3}, r"short_factor must be a list of numbers, got 3"),
        ({"short_mscale": None}, r"missing \['rope_scaling.short_mscale'\]"),
    ],
)
def test_longrope_settings_that_cannot_be(changes: dict[str, Any], says: str):
    config = json.loads((GOLDEN / "phimoe" / "config.json").read_text())
    with pytest.raises(ConfigError, match=says):
        arch_of({**config, "rope_scaling": {**config["rope_scaling"], **changes}})
