"""Routing's kernel: a row's choices are its own, ties and rows of no numbers are settled, and rows come out sorted."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nn.fused_routing import route_by_kernel, scoring_of
from jaxspec.nn.matrix import Matrix
from jaxspec.nn.router import RouterSpec
from jaxspec.nn.router import route as route_by_xla
from pallas_kernels.route.api import Scoring, obstacles, route
from pallas_kernels.route.cases import GROUPS, described
from pallas_kernels.row_blocks import sort
from pallas_kernels.select import UnsupportedKernel

SOFTMAX = Scoring("softmax", 3)
E, HEIGHT = 12, 4


@partial(jax.jit, static_argnames=("scoring", "height"))
def run(part_SXE: jax.Array, live_M: Any = None, bias_E: Any = None, *, scoring: Scoring, height: int | None = HEIGHT):
    biases = {} if bias_E is None else {"choice": bias_E}
    how: dict[str, Any] = {"live_M": live_M, "height": height, "implementation": "interpret"}
    return described(route(part_SXE, biases, scoring, **how))


def parts(rows: int, experts: int = E, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, rows, experts)), jnp.float32)


@pytest.mark.served
def test_a_row_does_not_see_its_neighbors():
    logits, bias = parts(16, 16), parts(1, 16, seed=1)[0, 0]
    together = run(logits, bias_E=bias, scoring=GROUPS)
    alone = run(logits[:, 9:10], bias_E=bias, scoring=GROUPS)
    for name in ("expert_MA", "weight_MA", "logits_ME"):
        assert np.asarray(getattr(alone, name)).tobytes() == np.asarray(getattr(together, name))[9:10].tobytes()


@pytest.mark.parametrize(("rows", "experts"), [(17, E), (40, 260)])
def test_rows_are_sorted_as_their_choices_say(rows: int, experts: int):
    """Where one program does all of it, and where rows are too many for that."""
    live = jnp.asarray(np.random.default_rng(2).random(rows) < 0.7)
    routed = run(parts(rows, experts), live, scoring=SOFTMAX)
    choice = jnp.where(live[:, None], routed.expert_MA, -1).reshape(-1)
    order, blocks = sort(choice, experts, HEIGHT, "xla")
    assert routed.sorted is not None
    known = int((choice >= 0).sum())
    np.testing.assert_array_equal(routed.sorted[0][:known], order[:known])
    wanted = described(replace(routed, sorted=(order, blocks))).sorted
    assert wanted is not None
    for name in ("group_N", "first_N", "count_N"):
        np.testing.assert_array_equal(getattr(routed.sorted[1], name), getattr(wanted[1], name))


def test_ties_go_to_the_lower_expert_and_no_numbers_to_others_all_the_same():
    logits = jnp.zeros((1, 3, E)).at[0, 1].set(jnp.nan).at[0, 2, 5].set(1.0)
    routed = run(logits, scoring=SOFTMAX)
    np.testing.assert_array_equal(routed.expert_MA[0], [0, 1, 2])
    np.testing.assert_array_equal(routed.expert_MA[2], [5, 0, 1])
    assert len(set(np.asarray(routed.expert_MA[1]).tolist())) == 3
    np.testing.assert_allclose(routed.weight_MA[0], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(routed.weight_MA[2].sum(), 1, rtol=1e-6)


@pytest.mark.parametrize("spec", [
    RouterSpec("topk_softmax", logit_bias=True),
    RouterSpec("sigmoid", scale=2.5, choice_bias=True, groups=4, kept_groups=2, exact=True),
])  # fmt: skip
def test_a_router_chooses_as_by_xla(spec: RouterSpec):
    """Of the second of two layers, with weights of a stack."""
    rng = np.random.default_rng(3)
    stack = jnp.asarray(rng.normal(size=(2, 64, 16)), jnp.bfloat16)
    names = [name for name, there in (("logit", spec.logit_bias), ("choice", spec.choice_bias)) if there]
    biases = {name: jnp.asarray(rng.normal(size=(2, 16)), jnp.float32) for name in names}
    x, layer = jnp.asarray(rng.normal(size=(5, 64)), jnp.float32), jnp.int32(1)
    params: dict[str, Any] = {name: Matrix(w, layer, "interpret") for name, w in {"router": stack, **biases}.items()}
    found = route_by_kernel(x, params, spec, 3, jnp.dtype("bfloat16"), live_M=None, height=None)
    assert found is not None
    assert found[1] is None, "nobody asked for sorted rows"
    wanted = route_by_xla(found[0].logits_ME, 3, spec, biases["choice"][1] if spec.choice_bias else None)
    np.testing.assert_array_equal(found[0].expert_MA, wanted.expert_MA)
    np.testing.assert_allclose(found[0].weight_MA, wanted.weight_MA, rtol=1e-6)
    rounded = x if spec.exact else jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)
    exact = np.asarray(rounded, np.float64) @ np.asarray(stack[1], np.float64)
    exact = exact + (np.asarray(biases["logit"][1]) if spec.logit_bias else 0)
    np.testing.assert_allclose(found[0].logits_ME, exact, atol=2e-5)


def test_what_the_kernel_does_not_compute():
    assert scoring_of(RouterSpec("softmax", renormalize=False), 2, biased=False) is None
    assert scoring_of(RouterSpec("softmax"), 2, biased=True) is None
    for spec in (RouterSpec("sqrt_softplus"), RouterSpec("sparse_mixer"), RouterSpec(soft_cap=30.0)):
        assert scoring_of(spec, 2, biased=False) is None
    by_logits = RouterSpec("sigmoid")
    assert scoring_of(by_logits, 2, biased=False) is None
    assert scoring_of(by_logits, 2, biased=True) is not None
    assert "more than 1024" in obstacles(2000, SOFTMAX)[0]
    assert "unequal groups" in obstacles(10, GROUPS)[0]
    with pytest.raises(UnsupportedKernel, match="from 1 to 12 experts can be chosen, got 13"):
        route(parts(2), {}, Scoring("softmax", 13))
    with pytest.raises(UnsupportedKernel, match="one number per expert, got logit"):
        route(parts(2), {"logit": jnp.zeros(3)}, SOFTMAX)
