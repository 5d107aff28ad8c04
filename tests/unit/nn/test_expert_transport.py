"""Rows find their experts on other devices and come back, however they are sent and however uneven the choices are."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.nn import expert_transport
from jaxspec.nn.expert_shards import on_each_device, rows_on_each
from jaxspec.nn.experts import run_experts
from jaxspec.nn.ffn import SILU
from jaxspec.nn.policy import make_policy
from jaxspec.nn.router import Routing
from jaxspec.nn.shardings import named_shardings
from jaxspec.sharding.mesh import make_mesh
from jaxspec.sharding.placement import settle

FLOAT32 = jnp.dtype("float32")
EXPERTS, TOP_K, DIM, HIDDEN = 8, 3, 16, 8
QUICK = {"data": 2, "expert": 2, "tensor": 2}
MESHES = [
    QUICK,
    *(pytest.param(m, marks=pytest.mark.slow) for m in ({"expert": 8}, {"expert": 2, "tensor": 4}, {"data": 8})),
]
KINDS = ("anywhere", "one expert", "one device", "nobody")


def ragged_reference(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What ``lax.ragged_all_to_all`` is defined to do, by gathering everything; XLA:CPU does not have it."""
    everything = (operand, input_offsets, send_sizes, output_offsets)
    operands, first, size, place = (lax.all_gather(x, axis_name) for x in everything)
    me, slot_S = lax.axis_index(axis_name), jnp.arange(output.shape[0], dtype=jnp.int32)
    for n in range(operands.shape[0]):
        at_S = slot_S - place[n, me]
        came = jnp.where(recv_sizes[n] == size[n, me], size[n, me], 0)  # both sides must know the same number
        row_S = operands[n][jnp.clip(first[n, me] + at_S, 0, operand.shape[0] - 1)]
        output = jnp.where(((at_S >= 0) & (at_S < came))[:, None], row_S, output)
    return output


@pytest.fixture
def ragged_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_reference)


def routing(kind: str, rows: int) -> Routing:
    rng = np.random.default_rng(1)
    choice = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
    if kind == "one expert":
        choice[:] = np.where(np.arange(TOP_K) == 0, 5, -1)
    if kind == "one device":
        choice[:] = [6, 7, 6]
    if kind == "nobody":
        choice[:] = -1
    return Routing(jnp.asarray(choice), jnp.asarray(rng.random((rows, TOP_K), np.float32)), jnp.zeros((rows, EXPERTS)))


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(dtype: jnp.dtype) -> dict[str, jax.Array]:
    shapes = {
        "gate_up_ED2F": (EXPERTS, DIM, 2, HIDDEN),
        "down_EFD": (EXPERTS, HIDDEN, DIM),
        "down_bias_ED": (EXPERTS, DIM),
    }
    return {name: jnp.asarray(numbers(shape, n), dtype) for n, (name, shape) in enumerate(shapes.items())}


def by_hand(x_MD: np.ndarray, routed: Routing, experts: dict[str, np.ndarray], live_M: np.ndarray) -> np.ndarray:
    out = np.zeros(x_MD.shape)
    for m, a in np.ndindex(routed.expert_MA.shape):
        e = int(routed.expert_MA[m, a])
        if e >= 0 and live_M[m]:
            gate, up = np.moveaxis(np.einsum("d,dzf->zf", x_MD[m], experts["gate_up_ED2F"][e]), 0, 0)
            y = gate / (1 + np.exp(-gate)) * up @ experts["down_EFD"][e] + experts["down_bias_ED"][e]
            out[m] += float(routed.weight_MA[m, a]) * y
    return out


@pytest.mark.usefixtures("ragged_on_cpu")
@pytest.mark.parametrize("transport", ["sum", "padded", "ragged"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_row_gets_what_its_experts_say(sizes: dict[str, int], transport: Any):
    mesh, rows = make_mesh(sizes), 11  # of which no mesh divides any
    policy = make_policy(FLOAT32, mesh=mesh.abstract_mesh, transport=transport)
    experts, x_MD, live_M = weights(FLOAT32), numbers((rows, DIM), 9), np.arange(rows) != 2
    placed = jax.device_put(experts, named_shardings(experts, mesh))
    run = jax.jit(lambda x, routed, experts, live: run_experts(x, routed, experts, SILU, policy, None, live))
    plain = {name: np.asarray(w, np.float64) for name, w in experts.items()}
    for kind in KINDS:
        routed = routing(kind, rows)
        found = np.asarray(run(x_MD, routed, placed, jnp.asarray(live_M)))
        wanted = by_hand(np.asarray(x_MD, np.float64), routed, plain, live_M)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(np.abs(wanted).max(), 1), err_msg=kind)


@pytest.mark.usefixtures("ragged_on_cpu")
@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_what_arrives_is_what_was_sent_to_the_bit(transport: Any):
    """Rows, choices and weights travel as bits, here beside bfloat16; each goes once to each device that it chose."""
    mesh, rows = make_mesh({"expert": 4}), 8
    policy = make_policy(mesh=mesh.abstract_mesh, transport=transport)
    routed, x_MD = settle((routing("anywhere", rows), jnp.asarray(numbers((rows, DIM), 1), jnp.bfloat16)), mesh)

    def told(x, choice, weight, experts, layer, sorted_rows):
        chosen = jnp.sum(jnp.where(choice >= 0, weight, 0), axis=1, keepdims=True)
        return jnp.concatenate(
            [jnp.where(jnp.any(choice >= 0, axis=1)[:, None], x, 0).astype(jnp.float32)[:, :-1], chosen], axis=1
        )

    held = {"down_EFD": jnp.zeros((EXPERTS, HIDDEN, DIM))}
    found = np.asarray(
        jax.jit(partial(on_each_device, told, policy))(x_MD, routed.expert_MA, routed.weight_MA, held, None)
    )
    visits = [len(set(row.tolist())) for row in np.asarray(routed.expert_MA) // 2]
    np.testing.assert_array_equal(found[:, :-1], np.asarray(x_MD, np.float32)[:, :-1] * np.array(visits)[:, None])
    np.testing.assert_allclose(found[:, -1], np.asarray(routed.weight_MA).sum(1), rtol=1e-6)


def test_ragged_sends_no_row_that_stays_away(monkeypatch: pytest.MonkeyPatch):
    sent = []

    def spy(operand, output, input_offsets, send_sizes, *rest, **named):
        sent.append(send_sizes)
        return ragged_reference(operand, output, input_offsets, send_sizes, *rest, **named)

    monkeypatch.setattr(lax, "ragged_all_to_all", spy)
    mesh, rows = make_mesh({"expert": 4}), 3
    routed = routing("one device", 4 * rows)

    def counts(x, choice, weight):
        expert_transport.exchange_ragged(lambda x, *_: x.astype(jnp.float32), x, choice, weight, 2, FLOAT32)
        return sent[-2][None]

    run = jax.shard_map(counts, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    found = np.asarray(jax.jit(run)(jnp.ones((4 * rows, DIM)), routed.expert_MA, routed.weight_MA))
    np.testing.assert_array_equal(found, [[0, 0, 0, rows]] * 4)


def test_rows_that_reach_a_device():
    policy = make_policy(mesh=make_mesh({"data": 2, "expert": 4}).abstract_mesh)
    assert [rows_on_each(policy, rows) for rows in (16, 15)] == [8, 15]
    assert [rows_on_each(policy.update(transport="padded"), rows) for rows in (16, 15)] == [8, 8]
