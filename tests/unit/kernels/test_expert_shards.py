"""Routed experts split over a mesh: the sum over devices is what one device computes."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec.nn.experts import choose_kernel, run_experts
from jaxspec.nn.ffn import Activation
from jaxspec.nn.policy import make_policy
from jaxspec.nn.router import Routing
from jaxspec.nn.shardings import named_shardings
from jaxspec.sharding.mesh import make_mesh
from pallas_kernels.weight_cases import abstract_weight, random_weight

FLOAT32 = jnp.dtype("float32")
POLICY = make_policy(FLOAT32, depth="stacked", kernels="interpret")
ROWS, EXPERTS, TOP_K, DIM, HIDDEN, LAYERS = 7, 8, 3, 64, 64, 2


@cache
def weights(form: str) -> dict[str, Any]:
    shapes = {"gate_up_ED2F": (DIM, 2, HIDDEN), "down_EFD": (HIDDEN, DIM)}
    keys = iter(jax.random.split(jax.random.key(0), 4))
    made = {n: random_weight(next(keys), abstract_weight(form, (LAYERS, EXPERTS), s, 32)) for n, s in shapes.items()}
    made["gate_up_bias_E2F"] = jax.random.normal(next(keys), (LAYERS, EXPERTS, 2, HIDDEN))
    made["down_bias_ED"] = jax.random.normal(next(keys), (LAYERS, EXPERTS, DIM))
    return made


def routing(kind: str) -> Routing:
    rng = np.random.default_rng(1)
    choice = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(ROWS)]).astype(np.int32)
    if kind == "one device":
        choice[:] = [0, 1, 0]
    weight = rng.random((ROWS, TOP_K)).astype(np.float32)
    return Routing(jnp.asarray(choice), jnp.asarray(weight), jnp.zeros((ROWS, EXPERTS)))


@cache
def computed(mesh: Mesh | None, form: str, kind: str) -> np.ndarray:
    experts, x_MD = weights(form), jax.random.normal(jax.random.key(1), (ROWS, DIM))
    policy = POLICY if mesh is None else POLICY.update(mesh=mesh.abstract_mesh)
    if mesh is not None:
        experts = jax.device_put(experts, named_shardings(experts, mesh))
    live_M = jnp.arange(ROWS) != 2
    run = jax.jit(lambda experts, x: run_experts(x, routing(kind), experts, Activation(), policy, jnp.int32(1), live_M))
    return np.asarray(run(experts, x_MD))


@pytest.mark.parametrize("form", ["float32", "fp8"])
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"expert": 8}, marks=pytest.mark.slow),
        {"expert": 4, "tensor": 2},
        {"data": 2, "expert": 2, "tensor": 2},
    ],
)
def test_devices_add_up(sizes: dict[str, int], form: str):
    found = computed(make_mesh(sizes), form, "anywhere")
    wanted = computed(None, form, "anywhere")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    assert np.all(found[2] == 0)
    assert np.abs(wanted).max() > 0.1


def test_one_device_may_hold_all_that_is_chosen():
    found = computed(make_mesh({"expert": 4}), "float32", "one device")
    wanted = computed(None, "float32", "one device")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_what_does_not_divide_is_left_to_xla():
    experts, policy = weights("fp8"), POLICY.update(mesh=make_mesh({"tensor": 4}).abstract_mesh)
    with pytest.warns(UserWarning, match="2 over 4 devices of the axis tensor"):
        choice = choose_kernel(ROWS, TOP_K, experts, policy, stacked=True)
    assert choice.implementation == "xla"
