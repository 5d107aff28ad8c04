"""Every case of every kernel compiles for an H100: nothing spills, shared memory suffices; and bad kernels do not."""

import pytest

from jaxspec.aot import process
from jaxspec.aot.kernel_cases import operations
from jaxspec.errors import ConfigError
from pallas_kernels.recurrent_steps.cases import PUBLISHED

pytestmark = pytest.mark.served

MOST_SHARED_BYTES = 232448
BAD = "tests.aot.bad_kernels:compile_product"


@pytest.mark.slow
@pytest.mark.parametrize("op", operations())
def test_every_case_compiles(op: str):
    found = process.run("jaxspec.aot.kernel_cases:compile_cases", gate=True, op=op)
    assert found
    assert {name: case["error"] for name, case in found.items() if case["error"]} == {}
    assert {
        name: case["shared_bytes"] for name, case in found.items() if case["shared_bytes"] > MOST_SHARED_BYTES
    } == {}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "scales"), [("gpt_oss_120b_1", 12), ("deepseek_v3_of_8_8", 2)])
def test_scales_are_used_a_turn_after_they_were_asked_for(case: str, scales: int):
    found = process.run("tests.aot.loop_loads:read", op="routed_experts", case=case, kernel="experts_gate_up")
    assert found == {"loaded": scales, "used": 0}


@pytest.mark.slow
def test_every_case_of_mosaic_compiles_to_tma_and_wgmma():
    reports = process.run("jaxspec.aot.kernel_cases:compile_cases", gate=True, op="routed_experts", by="mosaic")
    assert {"qwen3_30b_a3b_1", "qwen3_30b_a3b_2048", "mixtral_8x7b_2048", "qwen2_57b_a14b_64"} < set(reports)
    assert {name: case["error"] for name, case in reports.items() if case["error"]} == {}
    for case in reports.values():
        assert set(case["kernels"]) == {"experts_gate_up", "experts_down"}
        assert (case["launches"]["experts_gate_up"], case["launches"]["experts_down"]) == (1, 1)
        for kernel in case["kernels"].values():
            assert (kernel["target"], kernel["spilled_bytes"], kernel["serialized"]) == ("sm_90a", 0, False)
            assert kernel["products"] in (["m64n64k16.f32.bf16.bf16"], ["m64n128k16.f32.bf16.bf16"])
            assert kernel["reads"] >= 4  # rows and weights, ahead and in the loop
            assert kernel["writes"] == 1
            assert kernel["warpgroup_registers"] == [40, 232]
            assert kernel["shared_bytes"] <= MOST_SHARED_BYTES


@pytest.mark.slow
def test_attention_of_mosaic_compiles_to_tma_and_wgmma():
    reports = process.run("jaxspec.aot.kernel_cases:compile_cases", gate=True, op="verify_attention", by="mosaic")
    assert {"qwen3-30b-a3b-prefill-pool", "gpt-oss-window-prefill", "deepseek-v3-prefill", "deepseek-v3-tree"} < set(
        reports
    )
    assert {name: case["error"] for name, case in reports.items() if case["error"]} == {}
    for name, case in reports.items():
        short = name in (
            "prompt-ring",
            "gpt-oss-window-prefill",
        )  # a window within a piece, with nothing to put together
        pieces = 0 if short else 1
        found = (case["launches"]["verify_attention"], case["launches"].get("verify_attention_pieces", 0))
        assert found == (1, pieces), name
    kernels = [kernel for case in reports.values() for kernel in case["kernels"].items()]  # equal ones compile once
    assert {name for name, _ in kernels} == {"verify_attention", "verify_attention_pieces"}
    for name, kernel in kernels:
        assert (kernel["target"], kernel["spilled_bytes"], kernel["serialized"]) == ("sm_90a", 0, False)
        assert kernel["shared_bytes"] <= MOST_SHARED_BYTES
        if name == "verify_attention":
            assert "m64n64k16.f32.bf16.bf16" in kernel["products"]
            assert kernel["warpgroup_registers"] == [40, 232]
            assert kernel["reads"] >= 2  # queries and keys


@pytest.mark.slow
def test_activations_of_all_families_compile_by_mosaic():
    spilled = process.run("tests.aot.small_programs:compile_activations")
    assert len(spilled) >= 8
    assert set(spilled.values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("layer", PUBLISHED)
def test_a_recurrence_rounds_alike_for_any_rows_and_cuts(layer: str):
    """One call of eight positions or eight calls of one: the same sums in the same order, no product fused into any."""
    found = process.run("tests.aot.rounding:float_steps", gate=True, name=layer, rows=[1, 8], counts=[1, 4, 8])
    first, *others = found.values()
    assert len(others) == 5
    assert all(steps == first for steps in others)
    operations = {step.split()[0] for step in first}
    floats = {name for name in operations if "f32" in name}
    assert {"mul.rn.f32", "add.rn.f32"} <= floats <= {"mul.rn.f32", "add.rn.f32", "sub.rn.f32"}
    assert any(name.startswith("shfl") for name in operations)


def test_a_kernel_that_spills_does_not_compile():
    with pytest.raises(ConfigError, match="register spilling"):
        process.run(BAD, gate=True, tile=256, step=64, num_warps=4, num_stages=2)


def test_a_kernel_of_too_much_shared_memory_does_not_compile():
    with pytest.raises(ConfigError, match="Shared memory size limit exceeded"):
        process.run(BAD, gate=True, tile=256, step=256, num_warps=16, num_stages=4)


def test_the_same_kernel_compiles_in_small_tiles():
    assert process.run(BAD, gate=True, tile=64, step=64, num_warps=4, num_stages=2) == 0
