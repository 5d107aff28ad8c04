"""Kernels on parts of their operands: what devices compute together is what one of them computes by itself."""

import json
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.aot.kernel_choices import kernel_choices
from jaxspec.aot.programs import ProgramSettings, shortened
from jaxspec.nn.attention import OUT, QKV
from jaxspec.nn.dense import dense
from jaxspec.nn.devices import ONE, Devices, devices_of
from jaxspec.nn.ffn import DOWN, GATE_UP
from jaxspec.nn.param import Param, as_matrix
from jaxspec.nn.policy import Policy, make_policy
from jaxspec.sharding.mesh import make_mesh
from pallas_kernels.select import SlowKernelWarning
from pallas_kernels.weight_cases import abstract_weight, random_weight
from scripts.house_report import ROOT

FLOAT32 = jnp.dtype("float32")
ROWS, DIM, LAYERS = 8, 64, 2
COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute)\(")
# Declaration, shape, contracted axes, ways to store it, and all-reduces where a mesh splits it.
PRODUCTS: dict[str, tuple[Param, tuple[int, ...], int, tuple[str, ...], int]] = {
    "queries, keys and values": (QKV, (DIM, 4, 3, 16), 1, ("float32",), 0),
    "gate and up": (GATE_UP, (DIM, 2, 64), 1, ("float32", "fp8", "int8"), 0),
    "out of heads": (OUT, (8, 16, DIM), 2, ("float32",), 1),
    "down": (DOWN, (64, DIM), 1, ("float32", "fp8", "int8"), 1),
}


def policy_on(sizes: dict[str, int] | None, transport: str = "sum") -> Policy:
    mesh = None if sizes is None else make_mesh(sizes).abstract_mesh
    return make_policy(FLOAT32, kernels="interpret", mesh=mesh, transport=transport)


def multiplied(name: str, form: str, sizes: dict[str, int] | None) -> tuple[np.ndarray, Counter[str]]:
    """A product of a stack's second layer, and the collectives of its program."""
    param, shape, axes, _, _ = PRODUCTS[name]
    stack = random_weight(jax.random.key(1), abstract_weight(form, (LAYERS,), shape, 32))
    x = jax.random.normal(jax.random.key(0), (2, ROWS // 2, *shape[:axes]))
    policy, layer = policy_on(sizes), jnp.int32(1)
    if sizes is not None:
        mesh, specs = make_mesh(sizes), as_matrix(stack, param, policy, layer).specs
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))
        stack, x = jax.device_put(stack, where), jax.device_put(x, NamedSharding(mesh, P()))
    program = jax.jit(lambda x, w: dense(x, as_matrix(w, param, policy, layer), dtype=FLOAT32, axes=axes))
    compiled = program.lower(x, stack).compile()
    return np.asarray(compiled(x, stack)), Counter(COLLECTIVE.findall(compiled.as_text()))


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2, "expert": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize(("name", "form"), [(name, form) for name, case in PRODUCTS.items() for form in case[3]])
def test_a_product_of_parts(name: str, form: str, sizes: dict[str, int]):
    """Columns are split without any exchange; where the depth is, one all-reduce adds up."""
    product, collectives = multiplied(name, form, sizes)
    wanted, _ = multiplied(name, form, None)
    np.testing.assert_allclose(product, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    assert np.abs(wanted).max() > 0.5
    assert collectives == Counter({"all-reduce": 1} if PRODUCTS[name][4] else {})


def test_scales_that_are_cut_are_left_to_xla():
    with pytest.warns(SlowKernelWarning, match="scales of 32 numbers, and 64 over 4 devices of the axis tensor"):
        product, _ = multiplied("down", "fp8", {"tensor": 4})
    wanted, _ = multiplied("down", "fp8", None)
    np.testing.assert_allclose(product, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_what_is_split_over_which_axes():
    on = make_mesh({"data": 2, "expert": 2, "tensor": 2}).abstract_mesh
    own_rows, whole_rows = Devices(on, ("data", "expert")), Devices(on)
    assert [own_rows.over_rows(n) for n in (8, 6, 3)] == [("data", "expert"), ("data",), None]
    assert [own_rows.own_rows(n) for n in (8, 6, 3)] == [2, 3, 3]
    assert (whole_rows.over_rows(8), whole_rows.own_rows(8)) == (None, 8)
    assert (own_rows.over_heads(4), own_rows.over_heads(3), ONE.over_heads(4)) == ("tensor", None, None)
    assert own_rows.over_weight(QKV.axes, (DIM, 4, 3, 16)) == (None, "tensor", None, None)
    assert own_rows.over_weight(QKV.axes, (DIM, 3, 3, 16)) == (None,) * 4, "heads that do not divide are whole"


@pytest.mark.parametrize(("sizes", "transport", "rows"), [
    ({"tensor": 2}, "sum", ()), ({"expert": 2, "tensor": 2}, "sum", ()), ({"data": 2}, "sum", ("data",)),
    ({"data": 2, "expert": 2}, "ragged", ("data", "expert")), ({"expert": 4}, "ragged", ("expert",)),
])  # fmt: skip
def test_rows_are_split_over_data_and_where_they_are_exchanged_over_experts(sizes, transport: str, rows):
    compute = policy_on(sizes, transport).compute
    assert devices_of(compute).row_axes == compute.row_axes == rows
    assert compute.whole_kernels == "xla", "kernels that do not run on parts"


def test_experts_alone_split_nothing_else():
    compute = policy_on({"expert": 4}).compute
    assert devices_of(compute) is ONE
    assert compute.whole_kernels == "interpret"


@pytest.mark.parametrize(("name", "sizes", "transport"), [
    ("qwen3-30b-a3b", {"tensor": 8}, "sum"),
    ("gpt-oss-120b", {"expert": 4, "tensor": 2}, "sum"),
    ("mixtral-8x7b", {"expert": 4, "tensor": 2}, "ragged"),
    ("deepseek-v3", {"expert": 4, "tensor": 2}, "padded"),
    ("qwen3-8b", {"data": 2, "tensor": 4}, "sum"),
])  # fmt: skip
def test_kernels_compute_every_step_on_a_mesh(name: str, sizes: dict[str, int], transport: Any):
    """Traced for GPUs: nothing is left to XLA but a prompt's rows, whose caches may lie on other devices."""
    config = shortened(json.loads((ROOT / "configs" / "models" / f"{name}.json").read_text()), 2)
    mesh = make_mesh(sizes).abstract_mesh
    setting = ProgramSettings(config, rows=8, capacity=512, mesh=mesh, transport=transport, bucket=32)
    choices = kernel_choices(setting, ("ngram", "prefill"))
    to_cache = {"latents_to_cache", "heads_dense"} if name == "deepseek-v3" else {"heads_to_cache"}
    ops = {"add_norm", "few_rows_dense", "verify_attention"} | to_cache
    ops |= {"route", "routed_experts"} if name != "qwen3-8b" else set()
    assert {choice["op"] for choice in choices["ngram"]} == ops
    assert {choice["implementation"] for choice in choices["ngram"]} == {"triton"}
    left = {choice["op"]: choice["reason"] for choice in choices["prefill"] if choice["implementation"] == "xla"}
    own_rows = transport != "sum" or "data" in sizes
    assert set(left) == ((to_cache | {"verify_attention"}) - {"heads_dense"} if own_rows else set())
    assert all("whose caches lie on other devices" in reason for reason in left.values())
