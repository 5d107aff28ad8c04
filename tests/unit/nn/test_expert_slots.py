"""Choices reach the slots of their experts, replicas take turns, and the sums are the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspec.nn.experts import run_experts
from jaxspec.nn.ffn import SILU
from jaxspec.nn.moe import slots_for
from jaxspec.nn.policy import make_policy
from jaxspec.nn.shardings import named_shardings
from jaxspec.perf.expert_placement import EMPTY, slots_by_expert, slots_of
from jaxspec.pytree import replace
from jaxspec.sharding.mesh import make_mesh
from tests.unit.nn.test_expert_transport import (
    DIM,
    EXPERTS,
    FLOAT32,
    by_hand,
    numbers,
    ragged_reference,
    routing,
    weights,
)

# Expert 5, which may take all rows, is on all three devices; one slot is empty.
SLOTS = (5, 0, 3, 7, 5, 1, 6, 0, 5, 2, 4, EMPTY)
DEVICES = 3


def table() -> np.ndarray:
    lists = slots_by_expert(SLOTS, EXPERTS)
    return np.array([of + [-1] * (3 - len(of)) for of in lists], np.int32)


def test_the_program_and_the_arithmetic_choose_the_same_slots():
    rng = np.random.default_rng(0)
    expert, turn = rng.integers(0, EXPERTS, (40, 3)).astype(np.int32), rng.integers(0, 99, 40).astype(np.int32)
    found = np.asarray(jax.jit(slots_for)(expert, turn, table()))
    np.testing.assert_array_equal(found, slots_of(expert, turn[:, None], SLOTS))
    np.testing.assert_array_equal(np.array(SLOTS)[found], expert)
    first = np.array([[of[0]] for of in slots_by_expert(SLOTS, EXPERTS)], np.int32)
    np.testing.assert_array_equal(
        slots_for(jnp.asarray(expert), jnp.asarray(turn), jnp.asarray(first)), first[:, 0][expert]
    )


@pytest.mark.parametrize("transport", ["sum", "padded", "ragged"])
def test_uneven_choices_give_what_one_device_gives(transport: Any, monkeypatch: pytest.MonkeyPatch):
    """Also where every row chooses one expert, which its replicas then share."""
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_reference)
    rows, x_MD = 11, numbers((11, DIM), 9)
    plain, mesh = weights(FLOAT32), make_mesh({"expert": DEVICES})
    held = {name: w[np.maximum(np.array(SLOTS), 0)] for name, w in plain.items()}
    put = jax.device_put(held, named_shardings(held, mesh))
    policy = make_policy(FLOAT32, mesh=mesh.abstract_mesh, transport=transport)
    turn_M, live_M = jnp.arange(rows, dtype=jnp.int32), np.arange(rows) != 2

    def placed(x, routed, experts, live):
        slots = slots_for(routed.expert_MA, turn_M, jnp.asarray(table()))
        return run_experts(x, replace(routed, expert_MA=slots), experts, SILU, policy, None, live), slots

    run = jax.jit(placed)
    exact = {name: np.asarray(w, np.float64) for name, w in plain.items()}
    for kind in ("anywhere", "one expert", "one device"):
        routed = routing(kind, rows)
        routed = replace(routed, expert_MA=jnp.where(routed.expert_MA < 0, 5, routed.expert_MA))
        found, slots = run(x_MD, routed, put, jnp.asarray(live_M))
        wanted = by_hand(np.asarray(x_MD, np.float64), routed, exact, live_M)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(np.abs(wanted).max(), 1), err_msg=kind)
        if kind == "one expert":
            loads = np.bincount(np.asarray(slots).ravel() // 4, minlength=DEVICES)
            assert loads.max() - loads.min() <= 3, "11 rows by turns on three devices"
