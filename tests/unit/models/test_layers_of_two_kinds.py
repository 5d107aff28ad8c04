"""Configs of Llama 4, Gemma 4 and LongCat-Flash: which layer is of which kind, in both dialects; what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.arch import LayerSpec
from jaxspec.models.catalog import arch_of, ignored_keys
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.temperature import Temperature

GOLDEN = Path(__file__).parents[2] / "golden"


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config = {**json.loads((GOLDEN / name / "config.json").read_text()), **changes}
    return {key: value for key, value in config.items() if value is not ...}


def layers_of(name: str, **changes: Any) -> tuple[LayerSpec, ...]:
    return arch_of(config_of(name, **changes)).layers


def test_layers_that_turn_see_their_chunk():
    plain = [(y.attention.span, y.attention.rope is None) for y in layers_of("llama4_text")]
    assert plain == [(-7, False), (None, True), (-7, False)]
    every = layers_of("llama4_text", no_rope_layers=[], no_rope_layer_interval=3)
    assert [y.attention.rope is None for y in every] == [False, False, True]
    said = layers_of("llama4_text", layer_types=["full_attention", "chunked_attention", "full_attention"])
    assert [(y.attention.span, y.attention.rope is None) for y in said] == [(None, False), (-7, True), (None, False)]
    assert all(y.attention.span is None for y in layers_of("llama4_text", attention_chunk_size=None))
    assert {y.attention.qk_norm for y in layers_of("llama4_text", use_qk_norm=False)} == {"none"}
    assert [y.attention.qk_norm for y in layers_of("llama4_text")] == ["bare", "none", "bare"]


def test_experts_lie_where_the_list_says():
    def routed(**changes: Any) -> list[bool]:
        return [isinstance(y.ffn, MoeSpec) for y in layers_of("llama4_text", **changes)]

    assert routed() == [False, True, False]
    assert routed(moe_layers=[0, 2]) == [True, False, True]
    assert routed(moe_layers=[]) == [False] * 3
    assert routed(interleave_moe_layer_step=1) == [True] * 3
    assert ignored_keys(config_of("llama4_text", moe_layers=[])) == ()


def test_queries_grow_with_their_position():
    spec = layers_of("llama4_text")[1].attention.temperature
    assert spec == Temperature(0.3, 5, 256)
    positions = np.array([[0, 3, 4, 8, 9, 255, 400]], np.int32)
    wanted = 1 + 0.3 * np.log1p(np.minimum(positions + 1, 256) // 5)
    np.testing.assert_allclose(spec.at(positions), wanted, rtol=1e-6)
    for number in (True, 4):  # the first release wrote a number
        assert layers_of("llama4_text", attn_temperature_tuning=number)[1].attention.temperature == spec
    assert layers_of("llama4_text", attn_temperature_tuning=False)[1].attention.temperature is None


def test_sizes_of_full_layers_in_both_dialects():
    hub = config_of("gemma4_text")
    sizes = {"1": {"head_dim": 16, "num_key_value_heads": 1}}
    saved = config_of("gemma4_text", global_head_dim=..., num_global_key_value_heads=..., per_layer_config=sizes)
    assert arch_of(hub) == arch_of(saved)
    near, full = layers_of("gemma4_text")
    assert (near.attention.head_dim, near.attention.kv_heads, near.attention.shared_values) == (8, 2, False)
    assert (full.attention.head_dim, full.attention.kv_heads, full.attention.shared_values) == (16, 1, True)
    own = layers_of("gemma4_text", attention_k_eq_v=False)[1].attention
    assert (own.head_dim, own.kv_heads, own.shared_values) == (16, 2, False)


def test_the_last_layer_is_full_and_every_sixth_by_default():
    kinds = [y.attention.window for y in layers_of("gemma4_text", layer_types=None, num_hidden_layers=8)]
    assert kinds == [7, 7, 7, 7, 7, None, 7, None]
    assert layers_of("gemma4_text", layer_types=["sliding_attention"] * 2)[-1].attention.window is None


def test_a_layer_has_two_halves():
    (layer, _) = layers_of("longcat_flash")
    assert set(layer.streams) == {"latent", "second_latent"}
    assert (layer.ffn.choices, layer.ffn.experts, layer.ffn.shared_hidden) == (6, 4, layer.second.ffn.hidden)
    width = (8 + 4) ** -0.5
    for query, latent in ((True, True), (False, True), (True, False)):
        (layer, _) = layers_of("longcat_flash", mla_scale_q_lora=query, mla_scale_kv_lora=latent)
        for half in layer.halves:
            assert isinstance(half.attention, LatentSpec)
            assert half.attention.scale == pytest.approx(width * (2**0.5 if query else 1))
            assert half.attention.latent_scale == pytest.approx((32 / 12) ** 0.5 if latent else 1)
    assert layers_of("longcat_flash", zero_expert_num=0)[0].ffn.choices == 4
    assert layers_of("longcat_flash", zero_expert_num=None)[0].ffn.choices == 4


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers must say"),
        ("llama4_text", {"no_rope_layers": [1, 2, 1]}, "no_rope_layers must say"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "layer_types must name"),
        ("llama4_text", {"moe_layers": "all"}, "moe_layers must be a list of layer numbers"),
        ("llama4_text", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning must be true or false"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size must be"),
        ("gemma4_text", {"hidden_size_per_layer_input": ...}, "hidden_size_per_layer_input must be 0, got 'nothing"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input must be 0, got 8"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "does not have num_kv_shared_layers = 1"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "does not have use_bidirectional_attention = 'all'"),
        ("gemma4_text", {"per_layer_config": {"1": {"intermediate_size": 3}}}, "per_layer_config may hold"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": -1}}}, "per_layer_config.head_dim must be"),
        ("longcat_flash", {"zero_expert_type": "constant"}, "does not have zero_expert_type = 'constant'"),
        ("longcat_flash", {"router_bias": True}, "does not have router_bias = True"),
        ("longcat_flash", {"moe_topk": 7}, "moe_topk is 7, but there are only 6 experts"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        arch_of(config_of(name, **changes))
