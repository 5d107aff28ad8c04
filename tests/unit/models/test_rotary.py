"""Rotary settings in every dialect, and how far they extend a context."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.nn.rope import RopeSpec, frequencies

CONFIGS = Path(__file__).parents[3] / "configs" / "models"
QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def qwen(**changes: Any) -> ArchSpec:
    return arch_of({**json.loads((CONFIGS / "qwen3-8b.json").read_text()), "num_hidden_layers": 2, **changes})


def rope_of(arch: ArchSpec, layer: int = 0) -> RopeSpec:
    return arch.layers[layer].attention.rope


@pytest.mark.parametrize(
    ("longest", "settings", "wanted"),
    [
        (40960, None, 40960),
        (40960, QWEN, 131072),
        (32768, {**QWEN, "type": "yarn"}, 131072),
        (32768, {"type": "yarn", "factor": 4.0}, 131072),
        (131072, QWEN, 131072),
        (262144, QWEN, 262144),
        (4096, {"type": "linear", "factor": 2.0}, 8192),
        (16384, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        (131072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072),
        (8192, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 8192),
        (40960, {"rope_type": "default"}, 40960),
    ],
)
def test_the_longest_text(longest: int, settings: dict[str, Any] | None, wanted: int):
    assert qwen(max_position_embeddings=longest, rope_scaling=settings).max_position == wanted


def test_yarn_turns_as_its_paper_says():
    """Qwen3's 64 frequencies at factor 4 in float64: high ones stay, low ones are interpolated, a ramp lies between."""
    spec = rope_of(qwen(rope_scaling=QWEN))
    found, scale = frequencies(spec)
    assert scale == pytest.approx(0.1 * math.log(4.0) + 1)
    wanted = []
    low = math.floor(128 * math.log(32768 / (32 * 2 * math.pi)) / (2 * math.log(1e6)))
    high = math.ceil(128 * math.log(32768 / (1 * 2 * math.pi)) / (2 * math.log(1e6)))
    for i in range(64):
        plain = 1e6 ** (-2 * i / 128)
        share = min(max((i - low) / (high - low), 0.0), 1.0)
        wanted.append(plain / 4 * share + plain * (1 - share))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert (low, high) == (23, 40)


def test_a_scaling_beside_saved_parameters_counts():
    """Qwen's instructions, followed in a config that transformers 5 has saved."""
    saved = {"rope_theta": 1000000.0, "rope_type": "default"}
    arch = qwen(rope_parameters=saved, rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=32768)
    assert rope_of(arch).scaling == rope_of(qwen(rope_scaling=QWEN)).scaling
    assert rope_of(arch).theta == 1e6
    with pytest.raises(ConfigError, match=r"rope_scaling says 'linear' and rope_parameters 'yarn'; keep one"):
        qwen(rope_parameters=QWEN, rope_scaling={"type": "linear", "factor": 2.0})


def test_settings_by_kind_of_layer():
    nested = {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    kinds = ["sliding_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 128, "layer_types": kinds}
    arch = qwen(rope_parameters=nested, rope_theta=500000.0, **window)
    near, far = rope_of(arch, 0), rope_of(arch, 1)
    assert (near.theta, near.scaling) == (10000.0, None)
    assert far.theta == 500000.0
    assert far.scaling == rope_of(qwen(rope_scaling=QWEN)).scaling
    with pytest.raises(ConfigError, match=r"has settings for \['full_attention'\], but none for sliding_attention"):
        qwen(rope_parameters={"full_attention": nested["full_attention"]}, **window)


def test_settings_by_kind_are_refused_where_layers_are_alike():
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text()) | {"num_hidden_layers": 4, "rope_scaling": None}
    with pytest.raises(ConfigError, match=r"none for a family whose layers all turn alike"):
        arch_of(config | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}})


@pytest.mark.parametrize("key", ["xdrope_section", "short_factor", "alpha"])
def test_settings_of_other_mechanisms_are_refused(key: str):
    with pytest.raises(ConfigError, match=rf"\['{key}'\] are of mechanisms"):
        qwen(rope_parameters={"rope_theta": 1e6, key: [1, 2, 3]})
