"""Declared axes of parameters become mesh axes; what cannot be split is refused or replicated."""

import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.transformer import Transformer
from jaxspec.nn.param import declared
from jaxspec.nn.policy import make_policy
from jaxspec.nn.shardings import named_shardings
from jaxspec.protocol import CaptureSpec
from jaxspec.sharding.axis_rules import RULES, mesh_axes
from jaxspec.sharding.mesh import make_mesh
from pallas_kernels.quantized import Format, Quantized, abstract_quantized

GOLDEN = Path(__file__).parents[2] / "golden"
FP8 = Format("fp8", (128, 128))


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def specs(tree, mesh, **keywords):
    return jax.tree.map(lambda s: s.spec, named_shardings(tree, mesh, **keywords))


@pytest.mark.parametrize(
    ("name", "rank", "axes"),
    [
        ("embed_VD", 2, ("vocab", "embed")),
        ("gate_up_D2F", 3, ("embed", "gate_up", "mlp")),
        ("gate_up_ED2F", 4, ("expert", "embed", "gate_up", "mlp")),
        ("down_EFD", 4, ("layers", "expert", "mlp", "embed")),
        ("shared_gate_D1", 2, ("embed", "gate")),
        ("norm_D", 2, ("layers", "embed")),
    ],
)
def test_axes_are_those_declared(name: str, rank: int, axes: tuple[str, ...]):
    assert declared(("layers_0", "ffn", name)).axes_of(rank) == axes


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="parameter out_HCD has 1 dimensions; declared are"):
        declared("attention/out_HCD").axes_of(1)
    with pytest.raises(ConfigError, match="no module has declared a parameter small_EFD"):
        declared("small_EFD")


@pytest.mark.parametrize("depth", ["unrolled", "stacked"])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v4", "glm_moe_dsa", "opt", "gpt_oss"])
def test_flax_finds_the_same_axes_and_shardings(family: str, depth: str):
    """The boxes that ``init`` makes say what the declarations say, to Flax's own functions too."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    net = Transformer(arch_of(config), make_policy(depth=depth))
    token = jnp.zeros((1, 2), jnp.int32)
    boxed = jax.eval_shape(lambda key: net.init(key, token, token, method="logits_of"), jax.random.key(0))["params"]
    specs_by_path = jax.tree_util.tree_leaves_with_path(nn.get_partition_spec(boxed))
    shapes = jax.tree_util.tree_leaves_with_path(nn.unbox(boxed))
    for (path, spec), (_, leaf) in zip(specs_by_path, shapes, strict=True):
        assert tuple(spec) == declared(path).axes_of(len(leaf.shape)), path
    mesh = make_mesh({"expert": 2, "tensor": 2})
    theirs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, tuple(RULES.items()))
    ours = named_shardings(nn.unbox(boxed), mesh)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.spec == b.spec, ours, theirs))


def test_each_mesh_axis_splits_one_dimension():
    mesh = make_mesh({"expert": 4, "tensor": 2})
    assert mesh_axes(("layers", "expert", "mlp", "embed"), mesh) == (None, "expert", "tensor", None)
    axes, everything = ("expert", "mlp", "embed"), {"mlp": "tensor", "expert": "tensor"}
    assert mesh_axes(axes, mesh, everything) == (None, "tensor", None)
    assert mesh_axes(axes, mesh, dict(reversed(everything.items()))) == ("tensor", None, None)
    assert mesh_axes(axes[:2], make_mesh({"tensor": 8})) == (None, "tensor"), "an axis of one device splits nothing"


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
    assert "ffn/down_EFD: expert = 6 over expert = 4" in str(error.value)
    assert "ffn/gate_up_bias_E2F: expert = 6 over expert = 4" in str(error.value)
    made = specs(params, mesh, allow_replication=True)
    assert made == {"ffn": {"down_EFD": P(None, "tensor", None), "gate_up_bias_E2F": P(None, None, "tensor")}}


def test_long_refusals_are_cut_short():
    params = {f"layers_{y}": {"down_FD": shape(9, 4)} for y in range(30)}
    with pytest.raises(ConfigError, match=r"30 dimensions cannot be split evenly.*and 22 more"):
        named_shardings(params, make_mesh({"tensor": 2}))


def test_scales_follow_their_numbers_where_they_divide():
    mesh = make_mesh({"expert": 2, "tensor": 4})
    params = {
        "wide": {"down_EFD": abstract_quantized((4, 1024, 256), FP8)},  # 8 blocks over 4
        "small": {"down_EFD": abstract_quantized((4, 256, 256), FP8)},  # 2 blocks over 4
        "tight": {"down_EFD": abstract_quantized((4, 1024, 64), Format("fp4", (1, 32), True, -1))},
    }
    made = named_shardings(params, mesh)
    split = P("expert", "tensor", None)
    for name, scale in (("wide", split), ("small", P("expert", None, None)), ("tight", split)):
        leaf = made[name]["down_EFD"]
        assert isinstance(leaf, Quantized)
        assert (leaf.data.spec, leaf.scale.spec) == (split, scale)
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
