"""Routed experts against plain numpy, and rows that do not depend on how many rows are computed with them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.native.packing import pack
from jaxspec.nn.attend import Source, attend, positions_seen
from jaxspec.nn.dense import dense
from jaxspec.nn.experts import lay_out, run_packed, run_stacked, run_weighed
from jaxspec.nn.ffn import SILU, Activation
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.policy import make_policy
from jaxspec.nn.router import RouterSpec, Routing, route
from jaxspec.pytree import replace

EXPERTS, TOP_K, DIM, HIDDEN = 6, 2, 24, 20
FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
ROWS = (1, 2, 3, 5, 8, 40)


def weights(
    dtype: jnp.dtype, dim: int = DIM, hidden: int = HIDDEN, experts: int = EXPERTS
) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    gate_up = rng.normal(size=(experts, dim, 2, hidden)) * dim**-0.5
    down = rng.normal(size=(experts, hidden, dim)) * hidden**-0.5
    return jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)


def routing_of(kind: str, rows: int, experts: int = EXPERTS) -> Routing:
    rng = np.random.default_rng(rows)
    logits_ME = rng.normal(size=(rows, experts))
    if kind == "uneven":
        logits_ME += 2.0 * np.arange(experts)
    expert_MA = np.argsort(-logits_ME, axis=1)[:, :TOP_K].astype(np.int32)
    if kind == "one":  # every row's first choice is the same expert, and so is its second
        expert_MA[:] = [4, 1]
    weight_MA = rng.random((rows, TOP_K)).astype(np.float32)
    return Routing(jnp.asarray(expert_MA), jnp.asarray(weight_MA), jnp.asarray(logits_ME, jnp.float32))


def reference(x_MD: np.ndarray, routing: Routing, gate_up: jax.Array, down: jax.Array) -> np.ndarray:
    gate_up, down = np.asarray(gate_up, np.float64), np.asarray(down, np.float64)
    out = np.zeros(x_MD.shape)
    for m, x in enumerate(x_MD.astype(np.float64)):
        for expert, weight in zip(routing.expert_MA[m], routing.weight_MA[m], strict=True):
            gate, up = x @ gate_up[expert, :, 0], x @ gate_up[expert, :, 1]
            out[m] += float(weight) * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return out


@cache
def compiled(layout: str):
    names = ("gate_up_ED2F", "down_EFD")
    if layout == "native":

        def native(x, routing, *w):
            return run_packed(x, routing, dict(zip(names, w, strict=True)), SILU, jnp.dtype(w[0].kind))

        return jax.jit(native)
    if layout == "stacked":
        return jax.jit(
            lambda x, routing, *w: run_stacked(x, routing, dict(zip(names, w, strict=True)), SILU, w[0].dtype)
        )

    def deep(x, routing, *w):
        """The layer in the middle of three, the others being nothing but NaN."""
        stack = {n: jnp.stack([a * jnp.nan, a, a * jnp.nan]) for n, a in zip(names, w, strict=True)}
        return run_stacked(x, routing, stack, SILU, w[0].dtype, jnp.int32(1))

    return jax.jit(deep)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 31, 70])
@pytest.mark.parametrize("layout", ["stacked", "deep"])
def test_experts_equal_numpy(layout: str, rows: int):
    x_MD = np.random.default_rng(1).normal(size=(rows, DIM)).astype(np.float32)
    gate_up, down = weights(FLOAT32)
    for kind in ("even", "uneven", "one"):
        routing = routing_of(kind, rows)
        found = compiled(layout)(x_MD, routing, gate_up, down)
        wanted = reference(x_MD, routing, gate_up, down)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=kind)


@pytest.mark.parametrize("block", [1, 2, 8, 32])
def test_layout_gives_every_routed_row_its_own_slot(block: int):
    lay = jax.jit(partial(lay_out, experts=EXPERTS, block=block))
    for rows in (1, 5, 70, 200):
        for kind in ("even", "uneven", "one"):
            expert_MA = np.asarray(routing_of(kind, rows).expert_MA)
            blocks = lay(jnp.asarray(expert_MA))
            slot_MA, routed_S, expert_N = (np.asarray(a) for a in (blocks.slot_MA, blocks.routed_S, blocks.expert_N))
            row_S = routed_S // TOP_K
            assert len(set(slot_MA.ravel())) == rows * TOP_K
            np.testing.assert_array_equal(row_S[slot_MA], np.repeat(np.arange(rows)[:, None], TOP_K, axis=1))
            np.testing.assert_array_equal(expert_N[slot_MA // block], expert_MA)
            assert np.sum(row_S < rows) == rows * TOP_K, "the other slots are padding"
            loads = np.bincount(expert_MA.ravel(), minlength=EXPERTS)
            assert int(blocks.count) == np.sum(-(-loads // block))
            assert slot_MA.max() < int(blocks.count) * block


@pytest.mark.parametrize("layout", ["stacked", "native"])
def test_rows_that_are_not_live_touch_no_expert(layout: str):
    rows, live = 40, np.arange(40) % 3 == 0
    x_MD = np.random.default_rng(1).normal(size=(rows, DIM)).astype(np.float32)
    gate_up, down = weights(FLOAT32)
    routing = routing_of("uneven", rows)
    chosen = set(np.asarray(routing.expert_MA)[live].ravel().tolist())
    poison = [jnp.asarray([0.0 if e in chosen else np.nan for e in range(EXPERTS)], jnp.float32) for _ in range(2)]
    gate_up, down = gate_up + poison[0].reshape(-1, 1, 1, 1), down + poison[1].reshape(-1, 1, 1)
    x = np.where(live[:, None], x_MD, np.nan)
    weights_of = {"gate_up_ED2F": gate_up, "down_EFD": down}
    if layout == "native":
        packed = {name: pack(w, lead=1) for name, w in weights_of.items()}
        found = run_packed(x, routing, packed, SILU, FLOAT32, live=jnp.asarray(live))
    else:
        found = run_stacked(x, routing, weights_of, SILU, FLOAT32, live=jnp.asarray(live))
    clean = [jnp.nan_to_num(w) for w in (gate_up, down)]
    np.testing.assert_allclose(found[live], reference(x_MD, routing, *clean)[live], rtol=0, atol=1e-5)
    assert not np.any(np.asarray(found)[~live])


def test_layout_counts_live_rows_alone():
    expert_MA = jnp.asarray([[0, 1], [2, 3], [0, 2]], jnp.int32)
    blocks = lay_out(expert_MA, EXPERTS, 2, jnp.asarray([True, False, True]))
    assert int(blocks.count) == 3
    routed_S = np.asarray(blocks.routed_S)
    assert sorted(routed_S[routed_S < 6]) == [0, 1, 4, 5]


@pytest.mark.parametrize("kind", ["softmax", "topk_softmax"])
@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8])
def test_routing_equals_numpy(kind: str, top_k: int):
    logits_ME = np.random.default_rng(2).integers(-4, 4, (50, 8)).astype(np.float32)  # ties happen
    for renormalize in (True, False):
        found = jax.jit(route, static_argnums=(1, 2))(logits_ME, top_k, RouterSpec(kind, renormalize))
        order = np.argsort(-logits_ME, axis=1, kind="stable")[:, :top_k]
        prob = np.exp(logits_ME.astype(np.float64))
        chosen = np.take_along_axis(prob / prob.sum(axis=1, keepdims=True), order, axis=1)
        if renormalize or kind == "topk_softmax":
            chosen /= chosen.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(found.expert_MA, order)
        np.testing.assert_allclose(found.weight_MA, chosen, rtol=1e-5)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def changed(compute, whole: np.ndarray, counts=ROWS) -> list[int]:
    """The row counts at which the first rows come out with other bits than among all rows."""
    return [count for count in counts if not np.array_equal(bits(compute(count)), whole[:count])]


@pytest.mark.served
@pytest.mark.parametrize(("dim", "out"), [(24, 40), (704, 96)])
@pytest.mark.parametrize(("dtype", "most"), [(BFLOAT16, 40), (FLOAT32, 8)], ids=["bfloat16", "float32"])
def test_dense_is_row_invariant(dtype: jnp.dtype, most: int, dim: int, out: int):
    rng = np.random.default_rng(3)
    x_MD = rng.normal(size=(most, dim)).astype(np.float32)
    w = jnp.asarray(rng.normal(size=(dim, out)), dtype)
    compute, counts = jax.jit(dense), [rows for rows in ROWS if rows <= most]
    assert changed(lambda m: compute(x_MD[:m], w), bits(compute(x_MD, w)), counts) == []


@pytest.mark.served
@pytest.mark.parametrize("dim", [48, 1536])
def test_normalisation_is_row_invariant(dim: int):
    x_MD = np.random.default_rng(6).normal(size=(max(ROWS), dim)).astype(np.float32)
    compute = jax.jit(partial(rms_norm, weight_D=jnp.ones(dim), eps=1e-6))
    assert changed(lambda m: compute(x_MD[:m]), bits(compute(x_MD))) == []


@pytest.mark.served
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8)])
def test_routing_is_row_invariant(experts: int, top_k: int):
    logits_ME = np.random.default_rng(7).normal(size=(max(ROWS), experts)).astype(np.float32)
    compute = jax.jit(lambda x: route(x, top_k, RouterSpec()).weight_MA)
    assert changed(lambda m: compute(logits_ME[:m]), bits(compute(logits_ME))) == []


@pytest.mark.served
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize(("dim", "hidden"), [(24, 20), (128, 192)])
def test_experts_are_row_invariant(dim: int, hidden: int, dtype: jnp.dtype):
    x_MD = np.random.default_rng(4).normal(size=(max(ROWS), dim)).astype(np.float32)
    gate_up, down = (pack(w, lead=1) for w in weights(dtype, dim, hidden))
    for kind in ("uneven", "one"):
        routing = routing_of(kind, max(ROWS))

        def compute(count: int, routing: Routing = routing) -> jax.Array:
            part = jax.tree.map(lambda a: a[:count], routing)
            return compiled("native")(x_MD[:count], part, gate_up, down)

        assert changed(compute, bits(compute(max(ROWS)))) == [], kind


@pytest.mark.served
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "sinks"),
    [(4, 2, 16, BFLOAT16, True), (8, 1, 64, BFLOAT16, False), (8, 1, 64, FLOAT32, True)],
    ids=["bfloat16-sinks", "bfloat16-wide", "float32-wide-sinks"],
)
def test_attention_is_row_invariant(heads: int, kv_heads: int, width: int, dtype: jnp.dtype, sinks: bool):
    rng = np.random.default_rng(5)
    batch, most, room = 5, max(ROWS), 128
    k, v = (jnp.asarray(rng.normal(size=(batch, kv_heads, room, width)), dtype) for _ in "kv")
    q = rng.normal(size=(batch, most, heads, width)).astype(np.float32)
    sinks_H = jnp.asarray(rng.normal(size=heads), jnp.float32) if sinks else None
    start_B = np.array([70, 0, 31, 64, 7], np.int32)

    @jax.jit
    def compute(q, k, v, start_B):
        position_BT = start_B[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)

        def load(index):
            part = tuple(jax.lax.dynamic_slice_in_dim(a, index * 32, 32, axis=2) for a in (k, v))
            return *part, positions_seen(position_BT, index, 32)

        last = (jnp.max(position_BT) + 32) // 32
        return attend(
            q, [Source(0, last, load)], kv_heads=kv_heads, value_width=width, scale=0.2, dtype=dtype, sinks_H=sinks_H
        )

    whole = bits(compute(q, k, v, start_B))
    assert changed(lambda t: compute(q[:, :t], k, v, start_B).swapaxes(0, 1), whole.swapaxes(0, 1)) == [], "T"
    fewer = partial(changed, counts=(1, 2, 3))
    assert fewer(lambda b: compute(q[:b, :5], k[:b], v[:b], start_B[:b]), whole[:, :5]) == [], "B"


def test_activations_equal_numpy():
    gate, up = np.random.default_rng(8).normal(scale=9, size=(2, 50)).astype(np.float32)
    low, clipped = np.minimum(gate, 7), np.clip(up, -7, 7)
    wanted = {
        Activation(): gate / (1 + np.exp(-gate)) * up,
        Activation("silu", 7.0): low / (1 + np.exp(-low)) * clipped,
        Activation("swigluoai", 7.0): (clipped + 1) * low / (1 + np.exp(-1.702 * low)),
    }
    for activation, value in wanted.items():
        np.testing.assert_allclose(jax.jit(activation)(gate, up), value, rtol=2e-6, err_msg=str(activation))


def test_biased_choices_within_groups_equal_numpy():
    """DeepSeek-V3's choice, spelled out row by row."""
    rng = np.random.default_rng(9)
    logits_ME, bias_E = rng.normal(size=(40, 16)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    spec = RouterSpec("sigmoid", scale=2.5, choice_bias=True, groups=4, kept_groups=2)
    found = jax.jit(route, static_argnums=(1, 2))(logits_ME, 4, spec, bias_E)
    score_ME = 1 / (1 + np.exp(-logits_ME.astype(np.float64)))
    for row in range(40):
        wanted = (score_ME[row] + bias_E).reshape(4, 4)
        kept = np.argsort(-np.sort(wanted, axis=1)[:, -2:].sum(axis=1))[:2]
        hidden = np.where(np.isin(np.arange(4), kept)[:, None], wanted, -np.inf).ravel()
        chosen = np.argsort(-hidden)[:4]
        assert found.expert_MA[row].tolist() == chosen.tolist()
        weight = score_ME[row, chosen] / score_ME[row, chosen].sum() * 2.5
        np.testing.assert_allclose(found.weight_MA[row], weight, rtol=1e-5)


def test_weights_on_the_input_equal_numpy():
    """An expert of Llama 4 reads its row times the weight of the choice, and what it returns is not weighed again."""
    rows, (gate_up, down) = 5, weights(FLOAT32)
    routing, x = routing_of("even", rows), np.random.default_rng(1).normal(size=(rows, DIM)).astype(np.float32)
    live_M = jnp.asarray([True, True, False, True, True])
    named, policy = {"gate_up_ED2F": gate_up, "down_EFD": down}, make_policy(FLOAT32)
    found = run_weighed(jnp.asarray(x), routing, named, SILU, policy, live=live_M)
    one = replace(routing, weight_MA=jnp.ones((rows, 1)))
    wanted = np.zeros((rows, DIM))
    for a in range(TOP_K):
        weighed = x * np.asarray(routing.weight_MA)[:, a : a + 1]
        wanted += reference(weighed, replace(one, expert_MA=routing.expert_MA[:, a : a + 1]), gate_up, down)
    np.testing.assert_allclose(found, np.where(live_M[:, None], wanted, 0), atol=1e-5)
