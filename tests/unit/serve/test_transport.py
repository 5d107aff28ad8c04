"""The transport that an engine takes where nobody says: what the backend has, and of that what costs least."""

import json
from types import SimpleNamespace

import pytest

from jaxspec.config import shipped
from jaxspec.models.catalog import arch_of
from jaxspec.nn.policy import make_policy
from jaxspec.perf.hardware import CPU_RATES
from jaxspec.serve.transport import pass_of, rates_of, transport_for
from jaxspec.sharding.mesh import make_mesh

CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
POLICY = make_policy("bfloat16")


def arch(name: str):
    return arch_of(json.loads((shipped("models") / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("sizes", "rows", "device", "kernels", "wanted"),
    [
        ({"expert": 8}, 64, CPU, "xla", "padded"),
        ({"data": 2, "expert": 4}, 64, H200, "xla", "padded"),
        ({"expert": 8}, 4096, H200, "xla", "ragged"),
        ({"data": 2, "expert": 4}, 64, H200, "triton", "sum"),
        ({"expert": 4}, 6, H200, "xla", "sum"),
        ({"data": 4, "tensor": 2}, 8, H200, "xla", "sum"),
    ],
)
def test_the_cheapest_that_there_is(sizes, rows: int, device, kernels: str, wanted: str):
    policy = POLICY.update(kernels=kernels)
    assert transport_for(arch("qwen3-30b-a3b"), policy, make_mesh(sizes), rows, device) == wanted


def test_a_dense_model_has_nothing_to_exchange():
    assert transport_for(arch("qwen3-8b"), POLICY, make_mesh({"data": 8}), 8, CPU) == "sum"


def test_a_pass_by_a_config_alone():
    """Qwen3-30B-A3B: 3.35e9 parameters per token, 1.8e9 of them in 8 of 128 experts, .3e9 in the embedding."""
    one = pass_of(arch("qwen3-30b-a3b"), POLICY, 4)
    assert one.dense_flops == pytest.approx(2 * 1.23e9, rel=0.03)
    assert one.row_bytes == 48 * 2 * 4 * 128 * 2 * 1024
    assert (one.top_k, one.routed_layers, one.model_dim) == (8, 48, 2048)


def test_rates_by_the_name_of_a_device():
    assert rates_of(CPU) is CPU_RATES
    named = {kind: rates_of(SimpleNamespace(platform="gpu", device_kind=kind)).byte_s for kind in (
        "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090",
    )}  # fmt: skip
    assert named["NVIDIA H200"] < named["NVIDIA H100 80GB HBM3"] < named["NVIDIA H100 PCIe"]
    assert named["NVIDIA GeForce RTX 4090"] == named["NVIDIA H100 80GB HBM3"], "unknown ones count as an H100"
