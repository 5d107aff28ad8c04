"""Published models as plain numbers: the byte-ratio table, bounds of decode speed, caches, and every shipped config."""

import json
from functools import cache
from pathlib import Path

import pytest

from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.inspect.model_cost import model_cost, routed_order
from jaxspec.inspect.shipped import model_config
from jaxspec.models.catalog import arch_of
from jaxspec.perf.cost import ModelCost, byte_ratio
from jaxspec.perf.overlap import AssumedOverlap

# Rows: weight bytes of verifying 1, 2, 3, 4 and 7 drafts over those of a plain step, routing independent.
RATIOS = {
    ("qwen3-30b-a3b", 1): (1.56, 2.09, 2.58, 3.04, 4.26),
    ("qwen3-30b-a3b", 8): (1.54, 1.86, 2.06, 2.17, 2.30),
    ("qwen3-30b-a3b", 32): (1.12, 1.14, 1.14, 1.14, 1.14),
    ("gpt-oss-120b", 1): (1.37, 1.73, 2.08, 2.42, 3.36),
    ("gpt-oss-120b", 4): (1.62, 2.17, 2.65, 3.07, 4.06),
    ("gpt-oss-120b", 8): (1.63, 2.12, 2.51, 2.80, 3.35),
    ("gpt-oss-120b", 32): (1.34, 1.46, 1.50, 1.52, 1.53),
    ("gpt-oss-120b", 64): (1.12, 1.14, 1.14, 1.14, 1.14),
    ("gpt-oss-20b", 1): (1.30, 1.56, 1.79, 1.99, 2.46),
    ("gpt-oss-20b", 8): (1.25, 1.34, 1.37, 1.38, 1.38),
    ("gpt-oss-20b", 32): (1.01, 1.01, 1.01, 1.01, 1.01),
    ("mixtral-8x7b", 1): (1.66, 2.16, 2.53, 2.81, 3.30),
    ("mixtral-8x7b", 4): (1.30, 1.40, 1.43, 1.44, 1.44),
    ("mixtral-8x7b", 8): (1.10, 1.11, 1.11, 1.11, 1.11),
    ("olmoe-1b-7b", 1): (1.60, 2.12, 2.58, 2.98, 3.91),
    ("olmoe-1b-7b", 8): (1.32, 1.42, 1.46, 1.47, 1.48),
    ("olmoe-1b-7b", 32): (1.01, 1.01, 1.01, 1.01, 1.01),
}
# Gigabytes per token, and the tokens per second that 3.35 and 4.8 TB/s allow.
BOUNDS = {
    "qwen3-30b-a3b": (6.06, 553, 792),
    "gpt-oss-120b": (4.97, 674, 965),
    "gpt-oss-20b": (3.70, 905, 1297),
    "mixtral-8x7b": (25.5, 131, 188),
    "olmoe-1b-7b": (2.35, 1423, 2039),
}
# The same at one row and three drafts where neighbors overlap: shares .8 and .69 of the independent count.
OVERLAPPING = {
    "qwen3-30b-a3b": (2.14, 1.90),
    "gpt-oss-120b": (1.79, 1.63),
    "gpt-oss-20b": (1.57, 1.44),
    "olmoe-1b-7b": (2.13, 1.88),
}


@cache
def cost(name: str) -> ModelCost:
    return model_cost(model_config(name)[1], name=name)


@pytest.mark.parametrize(("name", "rows"), RATIOS)
def test_byte_ratios(name: str, rows: int):
    found = [byte_ratio(cost(name), rows, length) for length in (1, 2, 3, 4, 7)]
    assert found == pytest.approx(RATIOS[name, rows], rel=0.005)


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_decode_speed(name: str):
    """Routers and norms are counted here and not in the published table: at most 0.7 % more bytes."""
    size, on_h100, on_h200 = BOUNDS[name]
    found = cost(name).weight_bytes(1, 1)
    assert found / 1e9 == pytest.approx(size, rel=0.007)
    assert 3.35e12 / found == pytest.approx(on_h100, rel=0.01)
    assert 4.8e12 / found == pytest.approx(on_h200, rel=0.01)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlap_lowers_the_ratio(name: str):
    for share, expected in zip((0.8, 0.69), OVERLAPPING[name], strict=True):
        assert byte_ratio(cost(name), 1, 3, AssumedOverlap(share)) == pytest.approx(expected, rel=0.005)


def test_evict_touched_at_most_61_experts():
    """Published timings leave 30 GB for verifying 32 positions of Qwen3-30B-A3B: about .55 of the independent 112."""
    layer = cost("qwen3-30b-a3b").routed
    assert layer is not None
    experts = (30e9 - cost("qwen3-30b-a3b").dense_bytes) / (48 * layer.expert_bytes)
    assert experts == pytest.approx(61, abs=1)


def test_an_expert_by_hand():
    """gpt-oss-120b: 3 x 2880 x 2880 weights of 4.25 bits and 3 x 2880 biases; 36 layers in two kinds."""
    model = cost("gpt-oss-120b")
    assert [(x.count, x.experts, x.top_k) for x in model.layers] == [(18, 128, 4), (18, 128, 4)]
    for layer in model.layers:
        assert layer.expert_bytes == 3 * 2880 * 2880 * 4.25 / 8 + 3 * 2880 * 2
        assert layer.expert_flops == 2 * (3 * 2880 * 2880 + 3 * 2880)
    assert model.head_bytes == 201088 * 2880 * 2
    assert sum(model.memory_bytes.values()) == pytest.approx(65248815744, rel=1e-3), "what the release weighs"


def test_caches_of_windows_latents_and_compressed_entries():
    windowed, full = (x.caches for x in cost("gpt-oss-120b").layers)
    assert windowed[0].entries(1, 100_000) == 128
    assert full[0].entries(1, 100_000) == 100_001
    assert full[0].entry_bytes == 8 * 64 * 2
    (latent,) = cost("deepseek-v3").layers[1].caches
    assert (latent.entry_bytes, latent.heads) == ((512 + 64) * 2, 1)
    assert latent.entry_flops == 2 * 128 * (2 * 512 + 64)
    sparse = cost("deepseek-v3.2").layers[1].caches
    assert sparse[0].entries(1, 100_000) == 2048
    assert sparse[1].entries(1, 100_000) == 100_001, "the indexer reads every key"
    kinds = [x.caches for x in cost("deepseek-v4-flash").layers]
    assert sorted(map(len, kinds)) == [1, 3, 5, 5], "window alone, entries of 128, entries of 4 with an indexer"
    near, pooled, _, index, _ = kinds[1]
    assert near.entries(1, 100_000) == 128
    assert pooled.entries(1, 100_000) == 512
    assert index.entries(1, 100_000) == pytest.approx(100_001 / 4)


def test_prediction_is_a_model_of_its_own():
    found = cost("deepseek-v3").prediction
    assert found is not None
    assert [(x.count, x.experts, x.top_k) for x in found.layers] == [(1, 256, 8)]
    assert found.head_bytes == cost("deepseek-v3").head_bytes
    joined = 2 * 7168 * 7168
    assert found.layers[0].dense_bytes > cost("deepseek-v3").layers[1].dense_bytes + joined
    assert cost("deepseek-v4-flash").chain_only
    assert cost("qwen3-30b-a3b").prediction is None


def test_quantizing_a_plain_model_halves_its_experts():
    plain, eight = (model_cost(model_config("olmoe-1b-7b")[1], quantization=how).layers[0] for how in ("auto", "fp8"))
    assert eight.expert_bytes == pytest.approx(plain.expert_bytes / 2, rel=1e-3)
    assert eight.expert_flops == plain.expert_flops


def test_routed_layers_go_by_kind():
    order = routed_order(arch_of(model_config("gpt-oss-20b")[1]))
    assert order == [*range(0, 24, 2), *range(1, 24, 2)]


def test_models_by_name_file_and_directory(tmp_path: Path):
    name, config = model_config("olmoe-1b-7b")
    assert name == "olmoe-1b-7b"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    assert model_config(str(tmp_path / "mine")) == ("mine", config)
    assert model_config(str(tmp_path / "mine" / "config.json")) == ("config", config)
    with pytest.raises(ConfigError, match=r"nor one of deepseek-v3, deepseek-v3\.2"):
        model_config("gpt-5")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ConfigError, match="JSON object is needed, got list"):
        model_config(str(tmp_path / "bad.json"))
    with pytest.raises(ConfigError, match="configs/nothing is missing"):
        shipped("nothing")
