"""Routed experts of many rows: some at a time, in groups by the kernel, and out of packed weights, as all at once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.native.packing import pack
from jaxspec.nn import experts as room
from jaxspec.nn import grouped_experts as parts
from jaxspec.nn.experts import run_experts, run_stacked
from jaxspec.nn.ffn import SILU
from jaxspec.nn.grouped_experts import groupable, grouped_experts
from jaxspec.nn.policy import make_policy
from jaxspec.pytree import replace
from pallas_kernels.select import Choice
from tests.unit.nn.test_experts import BFLOAT16, DIM, EXPERTS, FLOAT32, HIDDEN, reference, routing_of, weights

ROWS = 70
INTERPRET = Choice("routed_experts", "", "interpret", "asked for")


def rows_of(count: int = ROWS) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(count, DIM)), jnp.float32)


def of_experts(dtype: jnp.dtype = FLOAT32) -> dict[str, Any]:
    return dict(zip(("gate_up_ED2F", "down_EFD"), weights(dtype), strict=True))


def test_groups_are_all_rows_and_have_gradients():
    x_MD, routing, own = rows_of(), routing_of("uneven", ROWS), of_experts()
    rng = np.random.default_rng(3)
    own |= {
        "gate_up_bias_E2F": jnp.asarray(rng.normal(size=(EXPERTS, 2, HIDDEN)), jnp.float32),
        "down_bias_ED": jnp.asarray(rng.normal(size=(EXPERTS, DIM)), jnp.float32),
    }
    # Some choices are of experts that are elsewhere.
    expert_MA = jnp.where(routing.expert_MA == 2, -1, routing.expert_MA)
    stack = {name: jnp.stack([w * jnp.nan, w]) for name, w in own.items()}
    assert groupable(stack, stacked=True)

    def grouped(x: Any, w: Any) -> jax.Array:
        stack = {name: jnp.stack([jnp.full_like(leaf, jnp.nan), leaf]) for name, leaf in w.items()}
        return grouped_experts(
            x, expert_MA, routing.weight_MA, stack, activation=SILU, dtype=FLOAT32, layer=jnp.int32(1),
            implementation=INTERPRET,
        )  # fmt: skip

    def stacked(x: Any, w: Any) -> jax.Array:
        return run_stacked(x, replace(routing, expert_MA=expert_MA), w, SILU, FLOAT32, live=expert_MA >= 0)

    def graded(compute: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            y = compute(x, w)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x_MD, own)

    (_, found), grads = graded(grouped)
    (_, wanted), wanted_grads = graded(stacked)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    for name, leaf in {"x": grads[0], **grads[1]}.items():
        other = {"x": wanted_grads[0], **wanted_grads[1]}[name]
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kernels", ["interpret", "xla", "native"])
def test_many_rows_are_computed_some_at_a_time(kernels: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "MOST_ROWS", 32)
    monkeypatch.setattr(room, "GROUPED_ROWS", 16)
    monkeypatch.setattr(room, "GATHERED_BYTES", 1 << 13)
    routing, own, live_M = routing_of("uneven", ROWS), of_experts(), np.arange(ROWS) % 3 != 1
    wanted = reference(np.asarray(rows_of()), routing, *own.values())
    if kernels == "native":
        own = {name: pack(w, lead=1) for name, w in own.items()}
    policy = make_policy(FLOAT32, kernels=kernels)
    run = jax.jit(partial(run_experts, activation=SILU, policy=policy))
    text = run.lower(rows_of(), routing, own).as_text()
    assert "stablehlo.while" in text
    np.testing.assert_allclose(run(rows_of(), routing, own), wanted, rtol=0, atol=1e-5)
    found = np.asarray(run(rows_of(), routing, own, live=jnp.asarray(live_M)))
    np.testing.assert_allclose(found, np.where(live_M[:, None], wanted, 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "close"), [(FLOAT32, 1e-5), (BFLOAT16, 1e-2)])
def test_few_rows_that_are_trained_on_go_in_groups(dtype: jnp.dtype, close: float, monkeypatch: pytest.MonkeyPatch):
    """Float32 parameters, and gradients of rows, choices and experts, are what XLA's products of blocks give."""
    x_MD, routing, own = rows_of(9), routing_of("uneven", 9), of_experts()
    used = []
    monkeypatch.setattr(room, "grouped_experts", lambda *args, **how: used.append(1) or grouped_experts(*args, **how))

    def graded(grouped: Any) -> Any:
        policy = make_policy(dtype, param=FLOAT32, grouped=grouped)

        def loss(x: Any, weight_MA: Any, w: Any) -> Any:
            return jnp.sum(jnp.sin(run_experts(x, replace(routing, weight_MA=weight_MA), w, SILU, policy)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x_MD, routing.weight_MA, own)

    wanted, found = graded("xla"), graded("interpret")
    assert used == [1]
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=close, atol=close * float(jnp.max(jnp.abs(one))))


@pytest.mark.served
def test_no_block_of_rows_has_weights_of_its_own():
    """What experts take of memory for thousands of rows does not depend on how many blocks of rows there are."""
    count, dim, hidden = 16, 256, 512
    own = {
        "gate_up_ED2F": jax.ShapeDtypeStruct((count, dim, 2, hidden), BFLOAT16),
        "down_EFD": jax.ShapeDtypeStruct((count, hidden, dim), BFLOAT16),
    }

    def allotted(rows: int) -> int:
        routing = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), routing_of("even", rows, count))
        x_MD = jax.ShapeDtypeStruct((rows, dim), jnp.float32)
        run = jax.jit(partial(run_experts, activation=SILU, policy=make_policy(BFLOAT16)))
        sizes: Any = run.lower(x_MD, routing, own).compile().memory_analysis()
        return sizes.temp_size_in_bytes

    gathered = 32768 * 2 // 128 * 3 * dim * hidden * 2  # bytes, of every block of 32,768 rows
    assert allotted(32768) < gathered
