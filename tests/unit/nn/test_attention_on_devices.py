"""Attention by kernels on a mesh: each device writes and reads the heads and rows that it has, and no others."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.cache.addressing import CacheSize, init_layer
from jaxspec.cache.window import Window
from jaxspec.nn.attention import Attention, AttentionSpec
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.latent_attention import LatentAttention, LatentSpec
from jaxspec.nn.policy import make_policy
from jaxspec.nn.rope import RopeSpec
from jaxspec.nn.shardings import named_shardings
from jaxspec.sharding.mesh import make_mesh
from jaxspec.sharding.placement import state_rules, state_shardings
from pallas_kernels.select import recording

FLOAT32 = jnp.dtype("float32")
ROWS, COUNT, DIM, BLOCK = 4, 3, 32, 8
ROPE = RopeSpec(10000.0, 16)
SPECS: dict[str, Any] = {
    "pages": AttentionSpec(8, 4, 16, ROPE, qk_norm="head", qkv_bias=True, out_bias=True),
    "ring": AttentionSpec(8, 4, 16, ROPE, window=8, sinks=True),
    "gated": AttentionSpec(8, 4, 16, ROPE, gated=True),
    "latent": LatentSpec(8, 16, 16, 32, RopeSpec(10000.0, 8), scale=0.2),
    "low queries": LatentSpec(8, 16, 16, 32, RopeSpec(10000.0, 8), scale=0.2, query_rank=24),
}
START_B = np.array([5, 0, 9, 13], np.int32)


def attended(
    kind: str, sizes: dict[str, int] | None, *, transport: Any = "sum", pool: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray], set[tuple[str, str, str]]]:
    """Output of three positions a row over a filled cache, the cache, and what computed them."""
    spec, mesh = SPECS[kind], None if sizes is None else make_mesh(sizes)
    on = None if mesh is None else mesh.abstract_mesh
    policy = make_policy(FLOAT32, kernels="interpret", mesh=on, transport=transport)
    net_of = LatentAttention if isinstance(spec, LatentSpec) else Attention
    net: Any = net_of(spec, DIM, 1e-6, policy)
    plain = net.clone(policy=make_policy(FLOAT32))
    x = jax.random.normal(jax.random.key(1), (ROWS, COUNT, DIM))
    token = jnp.zeros((ROWS, COUNT), jnp.int32)
    params = nn.unbox(plain.init(jax.random.key(0), x, Inputs(token, token)))
    params = jax.tree.map(lambda w: jax.random.normal(jax.random.key(w.size), w.shape) / 4, params)
    size = CacheSize(ROWS, 24, COUNT, BLOCK, pool=(ROWS * 3, BLOCK) if pool else None)
    memory = init_layer(spec.streams, size, FLOAT32)
    memory = {name: jax.random.normal(jax.random.key(7), page.shape) for name, page in memory.items()}
    table = jnp.arange(ROWS * 3, dtype=jnp.int32).reshape(ROWS, 3)[:, ::-1] if pool else None
    if mesh is not None:
        params = jax.device_put(params, named_shardings(params, mesh, allow_replication=True))
        rules = state_rules(policy.compute.row_axes or ("data",), own_pages=not pool)
        memory = jax.device_put(memory, state_shardings(memory, mesh, rules))
        rows = NamedSharding(mesh, P(policy.compute.row_axes or None))
        x, token = jax.device_put((x, token), rows)

    def run(params: Any, x: Any, memory: Any) -> Any:
        start_B = jnp.asarray(START_B)
        window = Window(start_B, table, block=BLOCK, rows_sharded=policy.compute.splits_rows)
        position_BT = start_B[:, None] + jnp.arange(COUNT, dtype=jnp.int32)
        return net.apply(params, x, Inputs(token, position_BT, window, memory))

    with recording() as choices:
        mixed = jax.jit(run)(params, x, memory)
    made = {(choice.op, choice.implementation, choice.reason) for choice in choices}
    return np.asarray(mixed.out_BTD), {name: np.asarray(page) for name, page in mixed.memory.items()}, made


def check(kind: str, sizes: dict[str, int], **how: Any) -> set[tuple[str, str, str]]:
    out, memory, made = attended(kind, sizes, **how)
    wanted, pages, _ = attended(kind, None, pool=how.get("pool", False))
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    for name, page in pages.items():
        np.testing.assert_allclose(memory[name], page, rtol=0, atol=2e-5 * np.abs(page).max())
    return made


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("kind", SPECS)
def test_each_device_attends_with_its_own_heads(kind: str, pool: bool):
    made = check(kind, {"tensor": 2}, pool=pool)
    assert {implementation for _, implementation, _ in made} == {"interpret"}
    ops, own = {"verify_attention", "few_rows_dense"}, {"latents_to_cache", "heads_dense"}
    more = {"pages": {"heads_to_cache"}, "ring": {"heads_to_cache"}, "gated": set()}
    assert {op for op, *_ in made} == ops | more.get(kind, own)


@pytest.mark.parametrize(("sizes", "transport"), [
    ({"data": 2, "tensor": 2}, "sum"), ({"expert": 2, "tensor": 2}, "padded"), ({"data": 2, "expert": 2}, "padded"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["pages", "ring", "latent"])
def test_each_device_attends_for_its_own_rows(kind: str, sizes: dict[str, int], transport: str):
    made = check(kind, sizes, transport=transport)
    assert {implementation for _, implementation, _ in made} == {"interpret"}


def test_heads_that_do_not_divide_are_whole_on_each_device():
    made = check("pages", {"tensor": 8})
    assert {implementation for _, implementation, _ in made} == {"interpret"}


def test_rows_of_their_own_do_not_share_a_pool():
    made = check("pages", {"data": 2}, pool=True)
    reasons = {op: reason for op, implementation, reason in made if implementation == "xla"}
    assert set(reasons) == {"heads_to_cache", "verify_attention"}
    assert all("a pool of pages" in reason for reason in reasons.values())
