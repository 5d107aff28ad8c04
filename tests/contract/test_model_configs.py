"""Every published config in configs/models: its parameters build unallocated, and counts, bytes and names are right."""

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxspec.checkpoint.load.load_plan import make_plan
from jaxspec.checkpoint.load.places import abstract_params, flatten
from jaxspec.checkpoint.load.release import ReleaseTensor, release_files, release_tensors
from jaxspec.checkpoint.load.stored import check_method
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.errors import ConfigError
from jaxspec.inspect import describe
from jaxspec.inspect.describe import count_parameters
from jaxspec.inspect.model_sizes import memory_bytes, parameters
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy
from jaxspec.nn.shardings import named_shardings
from jaxspec.sharding.mesh import make_mesh

CONFIGS = {path.stem: path for path in sorted(Path("configs/models").glob("*.json"))}
# Billions of parameters, in all and active per token, embedding and head in both, multi-token prediction in neither.
COUNTS = {
    "deepseek-v3": (671.0, 37.6),
    "deepseek-v3.2": (671.9, 38.4),
    "deepseek-v4-flash": (284.3, 13.8),
    "deepseek-v4-pro": (1573, 49.8),
    "gemma-4-26b-a4b": (25.23, 3.823),
    "gemma-4-31b": (30.70, 30.70),
    "glm-4.5": (352.8, 33.6),
    "glm-4.5-air": (106.9, 13.4),
    "glm-4.7-flash": (29.94, 3.90),
    "glm-5.1": (743.9, 41.8),
    "glm-5.2": (743.4, 41.25),
    "gpt-oss-120b": (116.8, 5.71),
    "gpt-oss-20b": (20.9, 4.19),
    "granite-3.1-3b-a800m": (3.30, 0.883),
    "granite-4.0-h-tiny": (6.94, 1.465),
    "kimi-k2": (1026, 32.9),
    "kimi-linear-48b-a3b": (49.12, 3.484),
    "laguna-xs.2": (33.44, 3.017),
    "lfm2-8b-a1b": (8.34, 1.558),
    "ling-3": (124.4, 5.506),
    "ling-lite-1.5": (16.80, 2.753),
    "ling-mini-2.0": (16.26, 1.433),
    "llama-3.1-8b": (8.03, 8.03),
    "llama-3.2-1b": (1.236, 1.236),
    "llama-3.3-70b": (70.55, 70.55),
    "llama-4-maverick": (400.7, 17.18),
    "llama-4-scout": (107.8, 17.17),
    "mellum-2-12b": (12.15, 2.439),
    "mimo-v2-flash": (308.8, 15.45),
    "minimax-m2": (228.7, 11.0),
    "minimax-text-01": (456.1, 48.40),
    "longcat-flash": (560.7, 32.18),
    "mistral-small-4": (119.0, 6.633),
    "mixtral-8x22b": (140.6, 39.2),
    "mixtral-8x7b": (46.7, 12.9),
    "nemotron-3-nano-30b-a3b": (31.58, 3.58),
    "olmoe-1b-7b": (6.92, 1.28),
    "opt-125m": (0.1252, 0.1252),
    "opt-350m": (0.3312, 0.3312),
    "opt-6.7b": (6.658, 6.658),
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
    "qwen2-57b-a14b": (57.4, 14.25),
    "qwen2.5-7b": (7.616, 7.616),
    "qwen3-235b-a22b": (235.1, 22.2),
    "qwen3-30b-a3b": (30.5, 3.35),
    "qwen3-8b": (8.19, 8.19),
    "qwen3-next-80b-a3b": (79.67, 3.875),
    "qwen3.5-35b-a3b": (34.66, 3.455),
    "sarvam-30b": (32.15, 4.521),
    "step-3.5-flash": (196.8, 11.99),
    "trinity-mini": (26.12, 3.475),
}
# ``total_size`` of the release's weight index: bytes of all tensors, to the byte.
TOTAL_SIZES = {
    "deepseek-v4-flash": 159609485896,
    "deepseek-v4-pro": 864704792696,
    "glm-5.2": 1506659919872,
    "gpt-oss-120b": 65248815744,
    "gpt-oss-20b": 13761264768,
    "llama-3.1-8b": 16060522496,
    "llama-3.3-70b": 141107412992,
    "mixtral-8x7b": 93405585408,
    "qwen1.5-moe-a2.7b": 28631568384,
    "qwen2.5-7b": 15231233024,
    "qwen3-235b-a22b": 470187269120,
    "qwen3-30b-a3b": 61064245248,
    "qwen3-8b": 16381470720,
}
# Gigabytes of releases whose index is not at hand, and whether multi-token prediction is in that figure.
GIGABYTES = {
    "deepseek-v3": (689, True),
    "deepseek-v3.2": (690, True),
    "glm-4.5": (706, False),
    "glm-4.5-air": (214, False),
    "glm-5.1": (1490, False),
    "kimi-k2": (1030, True),
    "minimax-m2": (230, True),
    "mixtral-8x22b": (281, True),
    "qwen2-57b-a14b": (115, True),
}
# Tensors of the release's weight index.
NAMES = {
    "deepseek-v3": 91991,
    "deepseek-v4-flash": 69187,
    "deepseek-v4-pro": 145116,
    "gpt-oss-20b": 459,
    "gpt-oss-120b": 687,
    "llama-3.1-8b": 291,
    "llama-3.2-1b": 146,
    "llama-3.3-70b": 723,
    "mixtral-8x7b": 995,
    "qwen1.5-moe-a2.7b": 4659,
    "qwen2.5-7b": 339,
    "qwen3-235b-a22b": 36945,
    "qwen3-30b-a3b": 18867,
}
# Values per token that caches grow by; windows do not grow.
CACHED = {
    "deepseek-v3": 35136,
    "deepseek-v4-flash": 3440,
    "glm-5.1": 54912,
    "gpt-oss-120b": 36864 // 2,
    "mixtral-8x7b": 65536,
    "qwen3-30b-a3b": 49152,
}
MESHES = {"one": {}, "experts": {"expert": 8}, "tensors": {"tensor": 8}, "both": {"expert": 4, "tensor": 2}}
# Where eight devices do not divide a model, and why.
REFUSED = {
    ("gemma-4-26b-a4b", "tensors"): "qk_DGQC: kv_heads = 2 over tensor = 8",
    ("gemma-4-31b", "tensors"): "qk_DGQC: kv_heads = 4 over tensor = 8",
    ("glm-4.7-flash", "tensors"): "kv_b_HXR: heads = 20 over tensor = 8",
    ("granite-3.1-3b-a800m", "tensors"): "embed_VD: vocab = 49155 over tensor = 8",
    ("granite-3.1-3b-a800m", "both"): "embed_VD: vocab = 49155 over tensor = 2",
    ("granite-4.0-h-tiny", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("ling-lite-1.5", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("ling-mini-2.0", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("mellum-2-12b", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("mimo-v2-flash", "tensors"): "qk_DGQC: kv_heads = 4 over tensor = 8",
    ("nemotron-3-nano-30b-a3b", "tensors"): "qkv_DGQC: kv_heads = 2 over tensor = 8",
    ("opt-125m", "tensors"): "qkv_DGQC: kv_heads = 12 over tensor = 8",
    ("qwen1.5-moe-a2.7b", "experts"): "down_EFD: expert = 60 over expert = 8",
    ("qwen2-57b-a14b", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("qwen2.5-7b", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("qwen3-235b-a22b", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("qwen3-30b-a3b", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("qwen3-next-80b-a3b", "tensors"): "qkv_DGQC: kv_heads = 2 over tensor = 8",
    ("qwen3.5-35b-a3b", "tensors"): "qkv_DGQC: kv_heads = 2 over tensor = 8",
    ("sarvam-30b", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
    ("trinity-mini", "tensors"): "qkv_DGQC: kv_heads = 4 over tensor = 8",
}
# The products in front of their recurrences are on every device whole.
RECURRENT = ("kimi-linear-48b-a3b", "lfm2-8b-a1b", "ling-3", "minimax-text-01")
SMALL = ("gpt-oss-20b", "llama-3.2-1b", "olmoe-1b-7b", "opt-125m", "opt-350m", "qwen1.5-moe-a2.7b")
QUANTIZED = {
    "deepseek-v3": "fp8",
    "deepseek-v4-flash": "fp4",
    "gpt-oss-20b": "fp4",
}


shapes_of = cache(abstract_params)


@pytest.fixture(scope="module", autouse=True)
def shapes_are_found_once() -> Iterator[None]:
    """Counts and shardings of a config read the same shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describe, "abstract_params", shapes_of)
        yield


@cache
def config_of(name: str) -> dict[str, Any]:
    return json.loads(CONFIGS[name].read_text())


@cache
def arch_named(name: str) -> ArchSpec:
    return arch_of(config_of(name))


@cache
def tensors_of(name: str) -> dict[str, ReleaseTensor]:
    return release_tensors(config_of(name))


def leaves_of(name: str, **policy: Any) -> dict[str, Any]:
    return flatten(shapes_of(Transformer(arch_named(name), make_policy(**policy))))


@pytest.mark.parametrize("name", sorted(CONFIGS | COUNTS))
def test_counts_are_the_published_ones(name: str):
    total, active = count_parameters(arch_named(name))
    assert total / 1e9 == pytest.approx(COUNTS[name][0], rel=0.01)
    assert active / 1e9 == pytest.approx(COUNTS[name][1], rel=0.01)


def test_counts_of_releases_by_their_sizes():
    """Phi-3.5-MoE and Sarvam-105B, whose rotary settings are not at hand."""
    sizes = {
        "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16, "rope_scaling": None,
    }  # fmt: skip
    total, active = count_parameters(arch_of(json.loads(Path("tests/golden/phimoe/config.json").read_text()) | sizes))
    assert total / 1e9 == pytest.approx(41.9, rel=0.01)
    assert active / 1e9 == pytest.approx(6.6, rel=0.01)
    sizes = {
        "vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 16384, "moe_intermediate_size": 2048,
        "num_hidden_layers": 32, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    total, active = count_parameters(
        arch_of(json.loads(Path("tests/golden/sarvam_mla/config.json").read_text()) | sizes)
    )
    assert total / 1e9 == pytest.approx(106.0, rel=0.01)
    assert active / 1e9 == pytest.approx(12.4, rel=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_layers_of_their_own_are_as_many_parameters(name: str):
    alone, together = leaves_of(name, depth="unrolled"), leaves_of(name, depth="stacked")
    assert len(alone) > len(together)
    assert parameters(alone) == parameters(together)
    assert memory_bytes(alone) == memory_bytes(together)


@pytest.mark.parametrize("name", sorted(TOTAL_SIZES))
def test_bytes_are_those_of_the_weight_index(name: str):
    assert sum(t.size_bytes for t in tensors_of(name).values()) == TOTAL_SIZES[name]


@pytest.mark.parametrize("name", sorted(GIGABYTES))
def test_bytes_are_the_published_ones(name: str):
    size, with_prediction = GIGABYTES[name]
    tensors = tensors_of(name).values()
    assert sum(t.size_bytes for t in tensors if with_prediction or not t.is_mtp) / 1e9 == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names_are_as_many_as_published(name: str):
    assert len(tensors_of(name)) == NAMES[name]


def test_names_of_multi_token_prediction_are_as_many_as_published():
    assert sum(name.startswith("mtp.0.") for name in tensors_of("deepseek-v4-flash")) == 1575
    mtp = {name for name, tensor in tensors_of("deepseek-v3").items() if tensor.is_mtp}
    assert all(name.startswith("model.layers.61.") for name in mtp)
    assert len(mtp) == 1564, "one layer of 1558 tensors, three norms, a projection, copies of embedding and head"


def test_a_release_quantized_afterwards_has_its_names():
    """GLM-5.2-FP8: 118629 tensors of 756 GB."""
    config = config_of("glm-5.2") | {"quantization_config": config_of("deepseek-v3")["quantization_config"]}
    tensors = release_tensors(config)
    assert len(tensors) == 118629
    assert sum(t.size_bytes for t in tensors.values()) / 1e9 == pytest.approx(756, rel=0.01)


@pytest.mark.parametrize("name", sorted(CACHED))
def test_caches_grow_as_published(name: str):
    streams = (stream for layer in arch_named(name).layers for stream in layer.streams.values())
    growing = [s for s in streams if s.reach is None and s.fixed is None]
    assert sum(s.heads * s.width / s.stride for s in growing) == CACHED[name]


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_promised_files_are_loaded_quantized(name: str):
    """What the name lists promise is what loading takes, with nothing missing, unknown or misshaped."""
    config, arch = config_of(name), arch_named(name)
    table, net = known_tables()[arch.family], Transformer(arch, make_policy(depth="stacked"))
    plan = make_plan(
        Path(name), net, table.rules(arch), unread=table.unread(arch),
        block=check_method(config), files=release_files(config),
    )  # fmt: skip
    assert not any(plan.problems.values()), plan.problems
    routed = plan.net.policy.storage.format_of("ffn/down_EFD")
    assert routed is not None
    assert routed.kind == QUANTIZED[name]
    in_files = sum(t.size_bytes for t in tensors_of(name).values() if not t.is_mtp)
    assert sum(memory_bytes(plan.leaves).values()) == pytest.approx(in_files, rel=0.02)
    made = named_shardings(plan.leaves, make_mesh({"expert": 8}))
    for leaf, sharding in zip(jax.tree.leaves(plan.leaves), jax.tree.leaves(made), strict=True):
        assert len(sharding.shard_shape(leaf.shape)) == leaf.ndim
    down = next(path for path in made if path.endswith("down_EFD"))
    assert made[down].data.spec == made[down].scale.spec == PartitionSpec(None, "expert", None, None)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_leaf_has_a_sharding(name: str):
    leaves = leaves_of(name, depth="stacked")
    for kind, sizes in MESHES.items():
        why = REFUSED.get((name, kind))
        if why is not None:
            with pytest.raises(ConfigError, match=why):
                named_shardings(leaves, make_mesh(sizes))
        share = shares(leaves, sizes, allow_replication=why is not None)
        routed = {part for path, part in share.items() if path.endswith(("_ED2F", "_EFD"))}
        whole = not sizes or (why is not None and kind == "experts")
        assert routed <= {1.0 if whole else 1 / 8}, "experts are split over all devices"
        if kind == "tensors" and why is None and name not in RECURRENT:
            held = sum(leaf.size * share[path] for path, leaf in leaves.items())
            assert held < sum(leaf.size for leaf in leaves.values()) / 7


def shares(leaves: dict[str, Any], sizes: dict[str, int], **keywords: bool) -> dict[str, float]:
    """Share of each parameter that one device holds."""
    made = named_shardings(leaves, make_mesh(sizes), **keywords)
    assert made.keys() == leaves.keys()
    shapes = {path: (leaf.shape, made[path].shard_shape(leaf.shape)) for path, leaf in leaves.items()}
    return {path: math.prod(held) / math.prod(whole) for path, (whole, held) in shapes.items()}
