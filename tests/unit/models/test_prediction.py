"""The layer of multi-token prediction that is trained for a model: its kind, and why some cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.prediction import one_layer_arch, with_one_layer
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.ffn import FfnSpec
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.nn.moe import MoeSpec

GOLDEN = Path(__file__).parents[2] / "golden"


def published(name: str) -> dict[str, Any]:
    return json.loads((shipped("models") / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "mixer", "ffn"),
    [
        ("deepseek-v3", LatentSpec, MoeSpec), ("glm-4.5", AttentionSpec, MoeSpec),
        ("glm-4.7-flash", LatentSpec, MoeSpec),
        ("qwen3-next-80b-a3b", AttentionSpec, MoeSpec), ("qwen3.5-35b-a3b", AttentionSpec, MoeSpec),
        ("mimo-v2-flash", AttentionSpec, FfnSpec), ("longcat-flash", LatentSpec, FfnSpec),
        ("nemotron-3-nano-30b-a3b", AttentionSpec, MoeSpec),  # promises none; the family's own kind
        ("qwen3-30b-a3b", AttentionSpec, MoeSpec), ("granite-4.0-h-tiny", AttentionSpec, MoeSpec),  # publish none
        ("kimi-linear-48b-a3b", LatentSpec, MoeSpec), ("llama-4-scout", AttentionSpec, MoeSpec),
    ],
)  # fmt: skip
def test_it_is_the_familys_or_like_the_last_with_attention(name: str, mixer: type, ffn: type):
    config = published(name)
    (layer,) = one_layer_arch(config).mtp
    assert isinstance(layer.attention, mixer)
    assert isinstance(layer.ffn, ffn)
    own = arch_of(config)
    assert layer in (own.mtp or own.layers) or not own.mtp


def test_of_several_layers_the_first_is_shared():
    config = published("deepseek-v3") | {"num_nextn_predict_layers": 3}
    assert with_one_layer(config)["num_nextn_predict_layers"] == 1
    assert one_layer_arch(config).mtp == arch_of(config).mtp[:1]


def test_a_config_inside_of_another_promises_it_there():
    config = json.loads((GOLDEN / "qwen3_5_moe/config.json").read_text())
    del config["text_config"]["mtp_num_hidden_layers"]
    assert not arch_of(config).mtp
    changed = with_one_layer(config)
    assert changed["text_config"]["mtp_num_hidden_layers"] == 1
    assert len(arch_of(changed).mtp) == 1
    assert "mtp_num_hidden_layers" not in config["text_config"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("deepseek-v4-flash", "it reads the residual streams of hyper-connections"),
        ("step-3.5-flash", "its layer has a vocabulary product of its own"),
        ("deepseek-v3.2", "an indexer chooses what its attention sees"),
        ("glm-5.1", "an indexer chooses what its attention sees"),
    ],
)
def test_what_cannot_be_trained_is_told(name: str, says: str):
    with pytest.raises(ConfigError, match=f"cannot be trained: {says}"):
        one_layer_arch(published(name))
