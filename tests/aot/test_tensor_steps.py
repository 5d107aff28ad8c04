"""Steps on a mesh with a tensor axis compile for several H100s: by the kernels of one, and two all-reduces a layer."""

from typing import Any

import pytest

from tests.aot.test_step_compiles import MIB, compiled, weight_or_cache_copies

pytestmark = pytest.mark.served

# The embedding's rows; and of greedy choices, over a split vocabulary, the largest number and its place.
ONCE = 3
EACH = ("heads_to_cache", "verify_attention", "route", "experts_gate_up", "experts_down")
# Layers, and launches per layer: those of one device (see ``test_step_compiles``), two all-reduces, the sum of the
# output product's parts before the first, and the sum with the stream after the second. gpt-oss also has the sum of the
# experts' last biases.
STEPS: dict[str, tuple[dict[str, int], int, int]] = {
    "qwen3-30b-a3b": ({"tensor": 4}, 48, 17),
    "mixtral-8x7b": ({"tensor": 2}, 32, 17),
    "gpt-oss-120b": ({"tensor": 2}, 36, 18),
}


def check_kernels(found: dict[str, Any], layers: int) -> None:
    kernels = found["kernels"]
    assert {name: kernels[name] for name in EACH} == dict.fromkeys(EACH, layers)
    assert kernels["add_norm"] == 2 * layers + 1, "before attention and experts, and before the head"
    assert kernels["few_rows_dense"] == 3 * layers + 1, "into attention, out of it, router; and the head"
    assert found["collectives"]["all-reduce"]["per_step"] == 2 * layers + ONCE
    assert weight_or_cache_copies(found) == []
    sizes = found["bytes"]
    assert sizes["temp"] < 96 * MIB
    assert sizes["aliased"] >= sizes["caches"], "the caches are written in place"
    assert found["launches"]["per_turn"] == 0, "no loop over the cache outside of kernels"
    assert {kernel: size for kernel, size in found["spills"].items() if kernel in found["shared_bytes"]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_tensor_axis_keeps_the_kernels(name: str):
    mesh, layers, each = STEPS[name]
    found = compiled(name, "ngram", devices=mesh["tensor"], mesh=mesh)
    check_kernels(found, layers)
    assert "sort_rows" not in found["kernels"], "the router leaves rows sorted"
    assert found["launches"]["per_step"] <= each * layers + 40


@pytest.mark.slow
def test_experts_and_heads_are_split_together():
    """Devices hold some of the experts, so that each sorts rows for its own."""
    found = compiled("qwen3-30b-a3b", "ngram", devices=8, mesh={"expert": 2, "tensor": 4})
    check_kernels(found, 48)
    assert found["kernels"]["sort_rows"] == 48


@pytest.mark.slow
def test_more_devices_than_heads_share_their_queries_out():
    """Four kv heads on eight devices: each device has one, and its part of the cache."""
    found = compiled("qwen3-30b-a3b", "plain", devices=8, mesh={"tensor": 8})
    check_kernels(found, 48)
    assert found["bytes"]["caches"] == 48 * 2 * 4 * 4352 * 128 * 2, "layers, keys and values, rows, positions, bytes"


@pytest.mark.slow
def test_each_device_has_its_own_heads_of_latents():
    found = compiled("deepseek-v3", "plain", gpu="h200", devices=8, mesh={"expert": 4, "tensor": 2})
    each = {"latents_to_cache": 61, "heads_dense": 2 * 61, "verify_attention": 61, "sort_rows": 58, "experts_down": 58}
    assert {name: found["kernels"][name] for name in each} == each
    assert found["collectives"]["all-reduce"]["per_step"] == 2 * 3 + 3 * 58 + ONCE, "shared experts have their own"
    assert weight_or_cache_copies(found) == []
    assert found["launches"]["per_step"] <= 1780
    assert found["launches"]["per_turn"] == 0
