"""Published configs as they are met: honored, or refused with one line; never misread and never a bare exception."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of, ignored_keys, known_families
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.rope import RopeScaling, RopeSpec, frequencies
from jaxspec.serve.defaults import end_ids

GOLDEN = Path(__file__).parents[2] / "golden"
DIRECTORIES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


def config_of(name: str, drop: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    return {key: value for key, value in {**config, **changes}.items() if key not in drop}


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.attention.window for layer in arch_of(config).layers]


def attention(config: dict[str, Any]) -> AttentionSpec:
    spec = arch_of(config).layers[0].attention
    assert isinstance(spec, AttentionSpec)
    return spec


UNREAD = {
    "attn_logit_softcapping": ("llama3", 50.0),
    "final_logit_softcapping": ("qwen3", 30.0),
    "attn_output_gate": ("qwen3_moe", True),
    "clip_qkv": ("olmoe", 8.0),
    "residual_multiplier": ("llama3", 0.22),
    "embedding_multiplier": ("llama3", 12),
    "logits_scaling": ("mixtral", 8),
    "alibi": ("llama3", True),
    "use_parallel_residual": ("llama3", True),
    "attention_chunk_size": ("llama3", 8192),
    "attention_bias": ("mixtral", True),
    "mlp_bias": ("llama3", True),
    "no_rope_layers": ("llama3", [1, 1, 0]),
    "use_qk_norm": ("mixtral", True),
    "qk_norm_type": ("minimax_m2", "per_head"),
    "scoring_func": ("deepseek_v3", "softmax"),
    "topk_method": ("deepseek_v3", "greedy"),
    "norm_topk_prob": ("mixtral", False),
    "use_routing_bias": ("minimax_m2", False),
    "n_group": ("qwen3_moe", 4),
    "routed_scaling_factor": ("mixtral", 2.5),
    "num_shared_experts": ("mixtral", 1),
    "moe_layer_freq": ("deepseek_v3", 2),
    "index_topk": ("deepseek_v3", 2048),
    "swiglu_limit": ("mixtral", 7.0),
    "swiglu_alpha": ("gpt_oss", 1.5),
    "sliding_window": ("llama3", 4096),
    "layer_types": ("deepseek_v3", ["linear_attention", "full_attention"]),
    "mlp_layer_types": ("mixtral", ["dense", "sparse"]),
    "hidden_activation": ("llama3", "gelu_pytorch_tanh"),
    "layer_norm_elementwise_affine": ("opt", False),
    "rope_interleaved": ("llama3", True),
}


@pytest.mark.parametrize("key", sorted(UNREAD))
def test_a_mechanism_that_nothing_reads_is_refused_by_name(key: str):
    name, value = UNREAD[key]
    with pytest.raises(ConfigError, match=rf"does not have {key} = .* in jaxspec"):
        arch_of(config_of(name, **{key: value}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama3", {"attn_logit_softcapping": None, "mlp_bias": False, "logits_scaling": 1.0, "no_rope_layers": []}),
        ("llama3", {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 3}),
        ("llama3", {"pretraining_tp": 4, "attention_dropout": 0.1, "partial_rotary_factor": 1.0}),
        ("qwen2", {"attention_bias": True, "qkv_bias": True}),
        ("minimax_m2", {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True}),
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
        ("gpt_oss", {"swiglu_alpha": 1.702, "hidden_act": "silu"}),
        ("mixtral", {"norm_topk_prob": True, "n_group": 1, "num_shared_experts": 0}),
    ],
)
def test_a_mechanism_that_is_off_changes_nothing(name: str, changes: dict[str, Any]):
    assert arch_of(config_of(name, **changes)) == arch_of(config_of(name))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 9}),
        ("glm4_moe", {"mlp_layer_types": ["dense"] * 3}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
        ("deepseek_v4", {"compress_ratios": [0, 0, 0, 0]}),
        ("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "num_hash_layers": 3}),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 3, "index_topk_freq": 4}),
    ],
)
def test_keys_of_what_no_layer_is_are_no_mechanisms(name: str, changes: dict[str, Any]):
    assert ignored_keys(config_of(name, **changes)) == ()


def test_all_such_keys_are_named_at_once():
    with pytest.raises(ConfigError, match=r"have alibi = True, clip_qkv = 8 in") as error:
        arch_of(config_of("llama3", clip_qkv=8, alibi=True))
    assert "\n" not in str(error.value)


def test_keys_that_say_nothing_are_listed():
    assert ignored_keys(config_of("llama3", my_note="hi", quant_hint=3, torch_dtype="float32")) == (
        "my_note", "quant_hint",
    )  # fmt: skip


def test_keys_of_experts_say_nothing_of_dense_layers():
    """As in the config of a dense head that was copied from its target's; experts in the files would be found."""
    config = config_of("llama3", num_experts=8, first_k_dense_replace=1, n_group=None)
    assert arch_of(config) == arch_of(config_of("llama3"))
    assert ignored_keys(config) == ("first_k_dense_replace", "num_experts")


@pytest.mark.parametrize("name", DIRECTORIES)
def test_goldens_say_nothing_in_vain(name: str):
    assert ignored_keys(config_of(name)) == ()


def test_windows_are_those_of_transformers():
    near = ["sliding_attention", "full_attention"]
    assert windows(config_of("mixtral", sliding_window=7)) == [7] * 2
    assert windows(config_of("mixtral", sliding_window=None)) == [None] * 2
    assert windows(config_of("llama3", sliding_window=5, layer_types=near)) == [5, None]
    switched = {"use_sliding_window": True, "sliding_window": 7, "layer_types": None}
    assert windows(config_of("qwen2", max_window_layers=1, **switched)) == [None, 7, 7]
    assert windows(config_of("qwen2_moe", max_window_layers=2, **switched)) == [7, None, None]
    assert windows(config_of("qwen3_moe", max_window_layers=2, **switched)) == [7] * 2
    absent = {"use_sliding_window": True, "max_window_layers": 1}
    assert windows(config_of("qwen2", ("sliding_window", "layer_types"), **absent)) == [None, 4096, 4096]
    assert windows(config_of("qwen2", sliding_window=0, use_sliding_window=False)) == [None] * 3


@pytest.mark.parametrize("value", [-1, 0, -3, "4096", "x", 2.5, True, 2**63, [7]])
def test_windows_that_cannot_be(value: Any):
    with pytest.raises(ConfigError, match=r"sliding_window must be"):
        arch_of(config_of("mixtral", sliding_window=value))


@pytest.mark.parametrize(
    ("name", "drop", "wanted"),
    [
        ("mixtral", ("rope_theta",), 1e6),
        ("minimax_m2", ("rope_theta",), 5e6),
        ("gpt_oss", ("rope_theta",), 150000.0),
        ("llama3", ("rope_theta",), 10000.0),
    ],
)
def test_a_missing_base_is_that_of_transformers_class(name: str, drop: tuple[str, ...], wanted: float):
    config = config_of(name, (*drop, "rope_parameters"))
    assert attention(config).rope.theta == wanted
    assert attention({**config, "rope_theta": "20000"}).rope.theta == 20000.0


def test_other_defaults_are_those_of_transformers_classes():
    assert arch_of(config_of("mixtral", ("rms_norm_eps",))).norm_eps == 1e-5
    router = arch_of(config_of("deepseek_v3", ("routed_scaling_factor",))).layers[-1].ffn.router
    assert router.scale == 2.5
    scaling = attention(config_of("gpt_oss", ("rope_scaling", "rope_parameters"))).rope.scaling
    assert (scaling.kind, scaling.factor, scaling.original, scaling.truncate) == ("yarn", 32.0, 4096, False)


WRONG: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (0, -1, math.nan, math.inf, 1e9, "x", [1], True),
    "rope_theta": (0, -5, math.nan, math.inf, 1e300, "x", [], True),
    "num_hidden_layers": (0, -1, 2**63, 2001, "2", 2.0, True, [2]),
    "hidden_size": (0, 2**63, 33.0, "32"),
    "vocab_size": (2**63, 0, None),
    "num_attention_heads": (2**63, 3, 0),
    "num_key_value_heads": (3, 2**63, "2", False),
    "head_dim": (7, 63, 1, -8),
    "num_local_experts": (2**63, 0, "8"),
    "num_experts_per_tok": (99, 0, -1),
    "intermediate_size": (2**63, 0),
    "max_position_embeddings": (2**63, 0, "256"),
    "partial_rotary_factor": (0, -0.5, 1.5, "x", math.nan),
    "tie_word_embeddings": ("false", 2, []),
    "quantization_config": ("x", 3, []),
    "model_type": ([], {}, 3, None, "nothing"),
    "hidden_act": ("gpt_oss", "swigluoai", [], 3, "no_such"),
    "rope_scaling": ("x", 3, [1], {"rope_type": "longrope"}, {"type": ["yarn"]}, {"factor": 4.0}),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_values_that_cannot_be(key: str, value: Any):
    config = config_of("mixtral", ("rope_parameters", "head_dim"))
    arch_of(config)
    with pytest.raises(ConfigError) as error:
        arch_of({**config, key: value})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


SETTINGS: dict[str, tuple[Any, ...]] = {
    "factor": (0, 0.5, -4, math.nan, math.inf, "x", [4], 1e9),
    "original_max_position_embeddings": (0, -1, "32", 2**63, 32.5),
    "beta_fast": (-1, "x", math.nan),
    "attention_factor": (0, -1, math.inf, "x"),
    "mscale_all_dim": (-1, "x"),
    "truncate": ("false", 1),
    "rope_theta": (0, "x", -1),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in SETTINGS.items() for value in values])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_rope_settings_that_cannot_be(name: str, key: str, value: Any):
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = config_of(name, ("rope_scaling", "rope_theta"), rope_parameters=settings)
    arch_of(config)
    with pytest.raises(ConfigError, match=key):
        arch_of({**config, "rope_parameters": {**settings, key: value}})


def test_llama3_has_its_bounds_in_order():
    settings = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 2.0}
    with pytest.raises(ConfigError, match=r"low_freq_factor must not exceed high_freq_factor"):
        arch_of(config_of("llama3", ("rope_parameters",), rope_scaling=settings))


def test_llama3_without_a_band_scales_what_is_slow():
    """As Llama 4 Scout's config has it: both bounds are one."""
    scaling = RopeScaling("llama3", 16.0, 8192, low=1.0, high=1.0)
    scaled, _ = frequencies(RopeSpec(5e5, 128, scaling=scaling))
    plain, _ = frequencies(RopeSpec(5e5, 128))
    slow = 2 * np.pi / plain > 8192
    assert 0 < slow.sum() < slow.size
    np.testing.assert_allclose(scaled, np.where(slow, plain / 16, plain))


@pytest.mark.parametrize("value", [2**63, 96, [1, 96], -1, "2", 2.0, True])
def test_end_ids_lie_in_the_vocabulary(value: Any):
    config = config_of("mixtral")
    assert config["vocab_size"] == 96
    for source in ({"eos_token_id": value}, {"text_config": {"eos_token_id": value, "vocab_size": 96}}):
        with pytest.raises(ConfigError, match=r"eos_token_id must be"):
            end_ids({**config, "eos_token_id": 1, **source}, {})
    with pytest.raises(ConfigError, match=r"eos_token_id must be"):
        end_ids(config, {"eos_token_id": value})


HOSTILE = (
    None, "x", "", [], [1], {}, {"a": {"b": 1}}, True, False, -1, 0, 3, 2**63, 10**400, 1.5, math.nan, math.inf, "4096",
    ["full_attention"], [[1]],
)  # fmt: skip
KEYS = (
    "sliding_window", "layer_types", "mlp_layer_types", "rope_scaling", "rope_parameters", "rotary_dim", "head_dim",
    "mlp_only_layers", "decoder_sparse_step", "quantization_config", "text_config", "n_group", "indexer_types",
    "index_topk_pattern", "compress_ratios", "compress_rates",
)  # fmt: skip


@pytest.mark.parametrize("name", DIRECTORIES)
def test_no_value_of_any_key_is_another_error(name: str):
    """Every key of a family's config with twenty values: an architecture, or one short line."""
    config, said = config_of(name), []
    for key in sorted({*config, *KEYS}):
        for value in HOSTILE:
            try:
                arch_of({**config, key: value})
            except ConfigError as error:
                said.append(str(error))
    assert len(said) > 100
    assert [text for text in said if "\n" in text or len(text) > 700] == []


def test_every_family_is_tried():
    assert {config_of(name)["model_type"] for name in DIRECTORIES} == set(known_families())
