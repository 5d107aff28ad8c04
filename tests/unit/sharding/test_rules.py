"""Letters of parameter names become mesh axes; what cannot be split is refused or replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.nn.policy import make_policy
from jaxspec.nn.quantized import Format, Quantized, abstract_quantized
from jaxspec.protocol import CaptureSpec
from jaxspec.sharding.mesh import make_mesh
from jaxspec.sharding.rules import logical_axes, mesh_axes, named_shardings

FP8 = Format("fp8", (128, 128))


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def specs(tree, mesh, **keywords):
    return jax.tree.map(lambda s: s.spec, named_shardings(tree, mesh, **keywords))


@pytest.mark.parametrize(
    ("name", "sizes", "axes"),
    [
        ("embed_VD", (32, 8), "VD"),
        ("gate_up_D2F", (8, 2, 16), "D2F"),
        ("gate_up_D2F_17", (8, 2, 16), "D2F"),
        ("gate_up_ED2F", (4, 8, 2, 16), "ED2F"),
        ("down_EFD", (3, 4, 16, 8), "YEFD"),
        ("shared_gate_D1", (8, 1), "D1"),
        ("norm_D", (5, 8), "YD"),
    ],
)
def test_letters_are_axes(name: str, sizes: tuple[int, ...], axes: str):
    assert logical_axes(("layers_0", "ffn", name), shape(*sizes)) == tuple(axes)


def test_names_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="parameter out_HCD has 1 dimensions, but its name ends in 3 letters"):
        logical_axes(("attention", "out_HCD"), shape(8))


def test_each_mesh_axis_splits_one_dimension():
    mesh = make_mesh({"expert": 4, "tensor": 2})
    assert mesh_axes(("Y", "E", "F", "D"), mesh) == (None, "expert", "tensor", None)
    everything = {"F": "tensor", "E": "tensor"}
    assert mesh_axes(("E", "F", "D"), mesh, everything) == (None, "tensor", None)
    assert mesh_axes(("E", "F", "D"), mesh, dict(reversed(everything.items()))) == ("tensor", None, None)
    assert mesh_axes(("E", "F"), make_mesh({"tensor": 8})) == (None, "tensor"), "an axis of one device splits nothing"


def test_trees_keep_their_structure():
    params = {"layers_0": {"attention": {"qkv_DGQC": shape(16, 4, 6, 8)}}, "head_DV": shape(16, 64)}
    made = specs(params, make_mesh({"expert": 2, "tensor": 4}))
    assert made == {
        "layers_0": {"attention": {"qkv_DGQC": P(None, "tensor", None, None)}},
        "head_DV": P(None, "tensor"),
    }


def test_routers_are_whole_on_every_device():
    params = {"ffn": {"router_DE": shape(16, 8), "choice_bias_E": shape(8), "down_EFD": shape(8, 4, 16)}}
    made = jax.tree.map(lambda s: s.spec, named_shardings(params, make_mesh({"expert": 4})))
    assert made["ffn"] == {"router_DE": P(None, None), "choice_bias_E": P(None), "down_EFD": P("expert", None, None)}


def test_heads_have_their_layers_and_vocabulary_split():
    layer = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    arch = arch_of(layer | {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24})
    spec = HeadSpec(arch, 16, CaptureSpec((1, 2), (0,)), fc_norm=True, draft_vocab=20, routing=(0, 1), experts=6)
    net = DraftHead(spec, make_policy("float32"))
    shapes = jax.eval_shape(net.initial, jax.random.key(0))["params"]
    found = specs(shapes, make_mesh({"expert": 2, "tensor": 2}))
    assert found["head_DW"] == P(None, "tensor")
    assert found["routing_DYE"] == P(None, None, None)
    assert found["fc_XD"] == P(None, None)
    assert found["first"]["attention"]["qkv_DGQC"] == P(None, "tensor", None, None)
    assert found["layers_0"]["ffn"]["down_FD"] == P("tensor", None)


def test_what_does_not_divide_is_refused_with_all_names():
    params = {"ffn": {"down_EFD": shape(6, 20, 8), "gate_up_bias_E2F": shape(6, 2, 20)}}
    mesh = make_mesh({"expert": 4, "tensor": 2})
    with pytest.raises(ConfigError, match="2 dimensions") as error:
        named_shardings(params, mesh)
    assert "ffn/down_EFD: E = 6 over expert = 4" in str(error.value)
    assert "ffn/gate_up_bias_E2F: E = 6 over expert = 4" in str(error.value)
    made = specs(params, mesh, allow_replication=True)
    assert made == {"ffn": {"down_EFD": P(None, "tensor", None), "gate_up_bias_E2F": P(None, None, "tensor")}}


def test_long_refusals_are_cut_short():
    params = {f"layers_{y}": {"down_FD": shape(9, 4)} for y in range(30)}
    with pytest.raises(ConfigError, match=r"30 dimensions cannot be split evenly.*and 22 more"):
        named_shardings(params, make_mesh({"tensor": 2}))


def test_scales_follow_their_numbers_where_they_divide():
    mesh = make_mesh({"expert": 2, "tensor": 4})
    params = {
        "down_EFD": abstract_quantized((4, 1024, 256), FP8),  # 8 blocks over 4
        "small_EFD": abstract_quantized((4, 256, 256), FP8),  # 2 blocks over 4
        "tight_EFD": abstract_quantized((4, 1024, 64), Format("fp4", (1, 32), True, -1)),
    }
    made = named_shardings(params, mesh)
    assert isinstance(made["down_EFD"], Quantized)
    split = P("expert", "tensor", None)
    assert (made["down_EFD"].data.spec, made["down_EFD"].scale.spec) == (split, split)
    assert (made["small_EFD"].data.spec, made["small_EFD"].scale.spec) == (split, P("expert", None, None))
    assert (made["tight_EFD"].data.spec, made["tight_EFD"].scale.spec) == (split, split)
    assert jax.tree.structure(made) == jax.tree.structure(params)


def test_arrays_land_where_their_shardings_say():
    mesh = make_mesh({"expert": 4, "tensor": 2})
    params = {
        "down_EFD": np.arange(8 * 4 * 2, dtype=np.float32).reshape(8, 4, 2),
        "table_VA": np.ones((6, 2), np.int32),
    }
    placed = jax.device_put(params, named_shardings(params, mesh))
    assert {s.data.shape for s in placed["down_EFD"].addressable_shards} == {(2, 2, 2)}
    assert {s.data.shape for s in placed["table_VA"].addressable_shards} == {(6, 2)}, "read by token id on every device"
    np.testing.assert_array_equal(placed["down_EFD"], params["down_EFD"])
