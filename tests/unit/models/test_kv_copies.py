"""Copies of key-value heads: every device along the tensor axis gets one, and files have each head once."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint.load.model import Model, load_model
from jaxspec.checkpoint.load.places import flatten
from jaxspec.checkpoint.load.save import export_tensors
from jaxspec.checkpoint.names.copies import shape_without_copies, with_copies, without_copies
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.kv_copies import with_kv_copies, without_kv_copies
from jaxspec.nn.policy import Policy, make_policy
from jaxspec.sharding.mesh import make_mesh
from pallas_kernels.quantized import Quantized
from tests.oracle.test_families_lossless import GOLDENS


def policy_on(tensor: int, kernels: Any = "interpret") -> Policy:
    return make_policy("float32", kernels=kernels, depth="stacked", mesh=make_mesh({"tensor": tensor}).abstract_mesh)


def arch(**attention: Any) -> ArchSpec:
    """A golden of four query heads and two of keys and values, maybe changed."""
    found = arch_of(json.loads((GOLDENS["qwen3_moe"] / "config.json").read_text()))
    layers = tuple(replace(layer, attention=replace(layer.attention, **attention)) for layer in found.layers)
    return replace(found, layers=layers)


def heads(arch: ArchSpec) -> list[tuple[int, int]]:
    specs: list[Any] = [layer.attention for layer in arch.layers]
    return [(spec.kv_heads, spec.kv_copies) for spec in specs]


def test_every_device_gets_one():
    assert heads(with_kv_copies(arch(), policy_on(4).compute)) == [(4, 2), (4, 2)]
    assert heads(with_kv_copies(arch(kv_heads=1), policy_on(4).compute)) == [(4, 4), (4, 4)]
    copied = with_kv_copies(arch(), policy_on(4).compute)
    assert with_kv_copies(copied, policy_on(4).compute) == copied
    assert without_kv_copies(copied) == arch()


@pytest.mark.parametrize(
    ("attention", "tensor", "kernels"),
    [
        pytest.param({}, 2, "interpret", id="enough"),
        pytest.param({}, 8, "interpret", id="more than queries"),
        pytest.param({}, 1, "interpret", id="one device"),
        pytest.param({}, 4, "xla", id="xla"),
        pytest.param({"qk_norm": "full"}, 4, "interpret", id="norms of all heads"),
        pytest.param({"shared_values": True}, 4, "interpret", id="keys as values"),
        pytest.param({"value_dim": 8}, 4, "interpret", id="apart"),
    ],
)
def test_heads_stay_as_they_are(attention: dict[str, Any], tensor: int, kernels: str):
    given = arch(**attention)
    assert with_kv_copies(given, policy_on(tensor, kernels).compute) == given


def test_copies_come_and_go():
    leaf = np.arange(2 * 3 * 6 * 4).reshape(2, 3, 6, 4)
    copied = with_copies(leaf, 2)
    assert copied.shape == (2, 6, 4, 4)
    assert shape_without_copies(copied.shape, 2) == leaf.shape
    np.testing.assert_array_equal(without_copies(copied, 2), leaf)
    np.testing.assert_array_equal(copied[:, ::2, -2:], copied[:, 1::2, -2:], "keys and values twice")
    np.testing.assert_array_equal(copied[:, :, :2].reshape(2, 3, 4, 4), leaf[:, :, :4], "queries once, in order")


@cache
def loaded(name: str, quantization: str, tensor: int) -> Model:
    if tensor == 1:
        return load_model(GOLDENS[name], make_policy("float32", depth="stacked"), quantization=quantization)
    mesh = make_mesh({"tensor": tensor})
    return load_model(GOLDENS[name], policy_on(tensor), quantization=quantization, mesh=mesh)


@pytest.mark.parametrize(("name", "quantization"), [
    ("qwen3_moe", "none"), ("qwen2", "none"), ("qwen3_moe", "int8"), ("qwen3_moe", "fp8"),
])  # fmt: skip
def test_files_are_read_with_copies(name: str, quantization: str):
    copied, plain = (flatten(loaded(name, quantization, tensor).params["params"]) for tensor in (4, 1))
    for path, leaf in plain.items():
        copies = 2 if "/qkv_" in path else 1
        assert isinstance(copied[path], Quantized) == isinstance(leaf, Quantized)
        for one, other in zip(jax.tree.leaves(copied[path]), jax.tree.leaves(leaf), strict=True):
            bits, wanted = np.asarray(one), np.asarray(other)
            assert without_copies(bits, copies).tobytes() == wanted.tobytes(), path
    qkv = next(leaf for path, leaf in copied.items() if path.endswith("qkv_DGQC"))
    data = qkv.data if isinstance(qkv, Quantized) else qkv
    assert {shard.data.shape[2] for shard in data.addressable_shards} == {1}


def test_files_are_written_without():
    model = loaded("qwen2", "none", 4)
    made = export_tensors(model.params, model.net.arch, np.dtype(np.float32))
    for name, array in load_file(GOLDENS["qwen2"] / "model.safetensors").items():
        np.testing.assert_array_equal(made[name], array.astype(np.float32))
