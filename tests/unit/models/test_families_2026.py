"""Configs of Step, Mistral 4, Ling and Trinity: read from every way to write them, refused where they cannot be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoint.heads.layers import rope_for_head
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.nn.temperature import Temperature

ROOT = Path(__file__).parents[3]
# What transformers 5.24 saves in place of the hub's keys of the golden Step 3.5.
HUB = (
    "num_attention_groups", "attention_other_setting", "rope_theta", "partial_rotary_factors", "rope_scaling",
    "moe_layers_enum", "moe_num_experts", "moe_top_k",
)  # fmt: skip
SAVED = {
    "num_key_value_heads": 2, "num_sliding_attention_heads": 6, "query_pre_attn_scalar": 8, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "per_layer_config": {"1": {"num_attention_heads": 6}, "2": {"num_attention_heads": 6}},
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3", "rope_theta": 500000.0, "partial_rotary_factor": 0.5, "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}  # fmt: skip


def read(name: str, drop: tuple[str, ...] = (), **changes: Any) -> ArchSpec:
    config = json.loads((ROOT / "tests" / "golden" / name / "config.json").read_text()) | changes
    return arch_of({key: value for key, value in config.items() if key not in drop})


def test_step_in_either_dialect():
    hub = read("step3p5")
    assert hub == read("step3p5", HUB, **SAVED)
    assert [layer.attention.heads for layer in hub.layers] == [4, 6, 6]
    assert [layer.attention.rope.dim for layer in hub.layers] == [4, 8, 8]
    assert [layer.attention.rope.scaling is None for layer in hub.layers] == [False, True, True]
    assert hub.expert_layers == (1, 2)


def test_bounds_by_layer():
    """Dense layers have the shared experts' bound; 0 and a missing list mean none."""
    dense, plain, last = (layer.ffn for layer in read("step3p5").layers)
    assert (dense.activation.limit, dense.activation.late) == (0.6, True)
    assert (plain.activation.limit, plain.shared_activation) == (None, None)
    assert (last.activation.limit, last.shared_activation.limit, last.activation.late) == (0.7, 0.5, True)
    without = read("step3p5", ("swiglu_limits", "swiglu_limits_shared"))
    assert all(layer.ffn.activation.limit is None for layer in without.layers)


def test_all_layers_from_the_fourth_have_experts_where_no_list_says():
    config = json.loads((ROOT / "configs" / "models" / "step-3.5-flash.json").read_text())
    assert arch_of({**config, "moe_layers_enum": None}) == arch_of(config)
    assert arch_of({**config, "moe_layers_enum": [3, *range(4, 45)]}) == arch_of(config)


def test_queries_of_mistral_4_grow():
    """``1 + 0.3 ln(1 + floor(position / 5))``."""
    spec = read("mistral4").layers[0].attention
    assert spec.temperature == Temperature(0.3, 5, 256, first=0)
    position_BT = np.arange(256, dtype=np.int32)[None]
    np.testing.assert_allclose(
        spec.temperature.at(position_BT), 1 + 0.3 * np.log(1 + np.floor(position_BT / 5)), rtol=1e-6
    )


def test_heads_of_such_targets():
    """Turn as the first layer of Step, and as Mistral 4 without the growth."""
    step, mistral = (
        json.loads((ROOT / "tests/golden" / n / "config.json").read_text()) for n in ("step3p5", "mistral4")
    )
    assert rope_for_head(step, 8) == replace(read("step3p5").layers[0].attention.rope, dim=8)
    assert rope_for_head(mistral, 8) == replace(read("mistral4").layers[0].attention.rope, interleaved=False)


def test_both_generations_of_ling():
    """The first chooses by softmax, without biases, and normalizes no heads."""
    second = read("bailing_moe").layers[1]
    assert (second.ffn.router.kind, second.ffn.router.choice_bias, second.attention.qk_norm) == (
        "sigmoid",
        True,
        "head",
    )
    first = arch_of(json.loads((ROOT / "configs" / "models" / "ling-lite-1.5.json").read_text())).layers[0]
    assert (first.ffn.router.kind, first.ffn.router.choice_bias, first.attention.qk_norm) == ("softmax", False, "none")
    assert first.ffn.shared_hidden == 2 * 1408


WRONG = {
    "rope_theta": ("step3p5", {"rope_theta": [1e4, 1e4]}, r"rope_theta must be listed for each of 3 layers"),
    "bounds": ("step3p5", {"swiglu_limits": [7.0]}, r"swiglu_limits must state a bound for each of 3 layers"),
    "bound": ("step3p5", {"swiglu_limits": [0, 0, -1.0]}, r"swiglu_limits must be a finite number above 0"),
    "layers": ("step3p5", {"moe_layers_enum": "1,x"}, r"moe_layers_enum must be a list of layer numbers, got '1,x'"),
    "heads": ("step3p5", {"per_layer_config": {"1": {"depth": 3}}}, r"per_layer_config may hold .* by layer"),
    "no rotation": ("step3p5", {"use_rope_layers": [1, 0, 1]}, r"does not have use_rope_layers"),
    "norms": ("step3p5", {"zero_centered": False}, r"does not have zero_centered = False"),
    "wrapped": ("mistral3", {"text_config": {"model_type": "ministral3"}}, r"must be mistral4 in mistral3, got 'minis"),
    "temperature": (
        "qwen3_moe",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
        r"\['llama_4_scaling_beta'\] are of mechanisms",
    ),
    "score": ("bailing_moe", {"score_function": "tanh"}, r"score_function must be sigmoid or softmax, got 'tanh'"),
    "head": ("bailing_moe", {"norm_head": True}, r"does not have norm_head = True"),
    "trinity": ("afmoe", {"score_func": "softmax"}, r"does not have score_func = 'softmax'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_values_that_cannot_be(case: str):
    name, changes, says = WRONG[case]
    with pytest.raises(ConfigError, match=says):
        read(name, **changes)
