"""Decode state lies where its names' letters say; rows that do not divide are refused, the rest is whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.errors import ConfigError
from jaxspec.models.transformer import HEAD
from jaxspec.nn.attention import QKV
from jaxspec.nn.shardings import named_shardings
from jaxspec.pytree import pytree
from jaxspec.shapes import Array
from jaxspec.sharding.axis_rules import REPLICABLE
from jaxspec.sharding.mesh import make_mesh
from jaxspec.sharding.placement import allocate, mesh_of, row_axes, settle, shapes_on, state_rules, state_shardings

MESH = {"data": 2, "expert": 2, "tensor": 2}


@pytree
class State:
    layers: tuple[dict[str, Array], ...]
    history_BS: Array
    key_BX: Array
    other: Array


def state(rows: int = 4, heads: int = 2) -> State:
    cache = {"k": jnp.zeros((rows, heads, 16, 8)), "latent": jnp.zeros((rows, 1, 16, 8))}
    return State((cache,), jnp.zeros((rows, 64), jnp.int32), jnp.zeros((rows, 2), jnp.uint32), jnp.zeros((3, 5)))


def specs(made, rules):
    return jax.tree.map(lambda s: s.spec, state_shardings(made, make_mesh(MESH), rules))


def test_rows_and_heads_are_split_by_their_letters():
    found = specs(state(), state_rules(("data", "expert"), own_pages=True))
    rows, heads = ("data", "expert"), ("tensor",)
    assert found.layers == ({"k": P(rows, heads, None, None), "latent": P(rows, None, None, None)},)
    assert (found.history_BS, found.key_BX, found.other) == (P(rows, None), P(rows, None), P())


def test_what_does_not_divide_and_pages_of_a_pool_are_whole():
    assert specs(state(6), state_rules(("data", "expert"), own_pages=True)).history_BS == P(None, None)
    assert specs(state(heads=3), state_rules(("data",), own_pages=True)).layers[0]["k"] == P(
        ("data",), None, None, None
    )
    assert specs(state(), state_rules(("data",), own_pages=False)).layers[0]["k"] == P(None, ("tensor",), None, None)


def test_rows_go_along_data_and_along_expert_where_they_are_exchanged():
    mesh = make_mesh(MESH)
    assert row_axes(mesh, 8, spread=True) == ("data", "expert")
    assert row_axes(mesh, 8, spread=False) == ("data",)
    assert row_axes(mesh, 6, spread=True) == ("data",)
    with pytest.raises(ConfigError, match=r"5 rows \(max_num_seqs\) cannot be split evenly over data = 2"):
        row_axes(mesh, 5, spread=True)


def test_allocated_where_it_is_to_lie():
    mesh = make_mesh(MESH)
    made = allocate(state, mesh, state_rules(("data",), own_pages=True))
    assert {s.data.shape for s in made.layers[0]["k"].addressable_shards} == {(2, 1, 16, 8)}
    assert mesh_of(made) == mesh
    assert mesh_of(allocate(state, None, {})) is None


def test_what_is_elsewhere_settles_on_every_device():
    mesh = make_mesh(MESH)
    placed = jax.device_put(
        np.zeros((4, 2)), state_shardings({"x_BX": np.zeros((4, 2))}, mesh, {"B": ("data",)})["x_BX"]
    )
    found = settle({"x": placed, "y": jnp.ones(3)}, mesh)
    assert found["x"] is placed
    assert (found["y"].sharding.spec, len(found["y"].addressable_shards)) == (P(), 8)
    shapes = shapes_on({"x": placed, "y": jnp.ones(3)}, mesh)
    assert (shapes["x"].sharding.spec, shapes["y"].sharding.spec) == (P(("data",), None), P())
    assert shapes_on({"y": jnp.ones(3)}, None)["y"].sharding is None


def test_heads_and_vocabulary_may_be_whole_but_not_experts():
    mesh, shape = make_mesh({"expert": 2, "tensor": 4}), lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    params = {"attention": {QKV.name: shape(16, 2, 4, 8)}, HEAD.name: shape(16, 97)}
    made = named_shardings(params, mesh, allow_replication=REPLICABLE)
    assert made["attention"]["qkv_DGQC"].spec == P(None, None, None, None)
    assert made["head_DV"].spec == P(None, None)
    with pytest.raises(
        ConfigError, match=r"ffn/down_EFD: expert = 3 over expert = 2; ffn/down_EFD: mlp = 6 over tensor = 4"
    ):
        named_shardings({"ffn": {"down_EFD": shape(3, 6, 16)}}, mesh, allow_replication=REPLICABLE)
