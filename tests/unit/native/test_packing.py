"""Packing moves numbers and changes none, in memory and while a checkpoint is read."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.load.places import flatten
from jaxspec.native.packing import Packed, pack, unpack
from jaxspec.native.product import kernels, product
from jaxspec.nn.policy import make_policy
from pallas_kernels.quantized import Format, Quantized, widen
from pallas_kernels.weight_cases import abstract_weight, random_weight

GOLDEN = Path(__file__).parents[2] / "golden"
MODELS = ("qwen3_moe", "deepseek_v3_fp8", "gpt_oss_mxfp4", "deepseek_v4_fp4")


def same(packed: Packed, w: Any) -> None:
    found = unpack(packed, jnp.float32)
    assert found.shape == w.shape == packed.shape
    np.testing.assert_array_equal(np.asarray(found), np.asarray(widen(w), np.float32))


@pytest.mark.parametrize("form", ["bfloat16", "float32", "int8", "fp8", "mxfp8", "mxfp4"])
@pytest.mark.parametrize(("lead", "sizes"), [((), (200, 80)), ((2, 3), (64, 48)), ((2,), (64, 1))], ids=str)
def test_what_is_unpacked_is_what_was_packed(form: str, lead: tuple[int, ...], sizes: tuple[int, int]):
    w = random_weight(jax.random.key(1), abstract_weight(form, lead, sizes, 32))
    same(pack(w, lead=len(lead)), w)


@pytest.mark.parametrize("form", ["bfloat16", "float32", "int8"])
def test_an_odd_depth(form: str):
    w = random_weight(jax.random.key(1), abstract_weight(form, (2,), (7, 5)))
    packed, x_MD = pack(w, lead=1), jax.random.normal(jax.random.key(0), (3, 7), jnp.float32)
    same(packed, w)
    if kernels().handle is not None:
        exact = np.asarray(x_MD, np.float64) @ np.asarray(widen(w), np.float64)[1]
        np.testing.assert_allclose(product(x_MD, packed, layer=jnp.int32(1)), exact, atol=2**-6)


def test_several_axes_are_contracted_and_several_come_out():
    w = jax.random.normal(jax.random.key(0), (2, 3, 8, 5, 4), jnp.float32).astype(jnp.bfloat16)
    packed = pack(w, lead=1, axes=2)
    assert (packed.inner, packed.outer, packed.lead) == ((3, 8), (5, 4), (2,))
    same(packed, w)


@pytest.mark.parametrize("blocks", [(1, 4, 32), (2, 36, 16), (4, 36, 1)], ids=str)
def test_scales_of_several_contracted_axes(blocks: tuple[int, int, int]):
    form, rng = Format("int8", blocks), np.random.default_rng(0)
    numbers = jnp.asarray(rng.integers(-127, 128, (4, 36, 32)), jnp.int8)
    w = Quantized(numbers, jnp.asarray(rng.random(form.scale_shape((4, 36, 32))), jnp.float32), form)
    same(pack(w, axes=2), w)


def test_scales_that_cut_through_pairs_are_refused():
    odd = Quantized(jnp.zeros((6, 4), jnp.int8), jnp.ones((2, 4)), Format("int8", (3, 1)))
    with pytest.raises(ValueError, match="cannot be packed"):
        pack(odd)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_packed_while_it_is_read(name: str):
    policy = make_policy("bfloat16", depth="stacked")
    plain = flatten(load_model(GOLDEN / name, policy).params["params"])
    packed = load_model(GOLDEN / name, policy.update(kernels="native")).params["params"]
    leaves = jax.tree_util.tree_flatten_with_path(packed, is_leaf=lambda x: isinstance(x, Packed | Quantized))[0]
    found = {"/".join(part.key for part in path): leaf for path, leaf in leaves}
    assert found.keys() == plain.keys()
    assert any(path.endswith("down_EFD") and isinstance(leaf, Packed) for path, leaf in found.items())
    for path, leaf in found.items():
        if isinstance(leaf, Packed):
            same(leaf, plain[path])
        else:
            jax.tree.map(np.testing.assert_array_equal, leaf, plain[path])
            assert not path.endswith(("qkv_DGQC", "down_FD", "gate_up_D2F", "head_DV", "router_DE"))


def test_quantizing_at_loading_packs_too():
    policy = make_policy("bfloat16", depth="stacked")
    plain = flatten(load_model(GOLDEN / "qwen3_moe", policy, quantization="int8").params["params"])
    packed = load_model(GOLDEN / "qwen3_moe", policy.update(kernels="native"), quantization="int8").params["params"]
    leaf = packed["segment_0"]["attention"]["qkv_DGQC"]
    assert isinstance(leaf, Packed)
    assert leaf.kind == "int8"
    same(leaf, plain["segment_0/attention/qkv_DGQC"])
