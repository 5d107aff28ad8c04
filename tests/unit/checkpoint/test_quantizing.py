"""Quantizing a plain checkpoint while it loads: the nearest numbers, only where it pays, refused where it is late."""

from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoint.heads.directory import load_head, save_head
from jaxspec.checkpoint.load.block_scales import block_scales, dequantize, quantize
from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.load.places import flatten, unflatten
from jaxspec.errors import ConfigError
from jaxspec.nn.policy import Policy, make_policy
from jaxspec.pytree import replace
from pallas_kernels.quantized import Format, Quantized
from tests.unit.checkpoint.head_cases import FLOAT32, LATENT, ROUTED, TARGET, head, logits, spec

GOLDEN = Path(__file__).parents[2] / "golden"
LAYOUTS = ("unrolled", "stacked")


def policy(layout=LAYOUTS[0], dtype: str = "bfloat16") -> Policy:
    return make_policy(dtype, depth=layout)


def wide(leaf: Quantized) -> np.ndarray:
    """What a parameter stands for, by plain numpy."""
    data, scale = np.asarray(leaf.data).astype(np.float32), np.asarray(leaf.scale)
    for axis, block in enumerate(leaf.format.blocks, start=data.ndim - len(leaf.format.blocks)):
        scale = scale.take(np.arange(data.shape[axis]) // block, axis)
    return data * scale


@pytest.mark.parametrize("shape", [(192, 192), (576, 512), (136, 192), (7, 5)], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8 by rows", "int8 by columns"])
def test_own_quantization_is_the_nearest(kind: str, shape: tuple[int, int]):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * rng.lognormal(0, 2, (shape[0], 1))).astype(np.float32)
    x[: min(128, shape[0] - 1), : min(128, shape[1] - 1)] = 0  # a block or a part of one without a largest number
    blocks = {"fp8": (128, 128), "int8 by rows": (1, shape[1]), "int8 by columns": (shape[0], 1)}[kind]
    form = Format("fp8" if kind == "fp8" else "int8", blocks)
    scale = block_scales(x, form)
    assert scale.shape == form.scale_shape(shape)
    numbers = quantize(x, scale, form)
    back = dequantize(numbers, scale, form, np.dtype(np.float32))
    for block in np.ndindex(scale.shape):
        here = tuple(slice(i * b, (i + 1) * b) for i, b in zip(block, blocks, strict=True))
        top = np.abs(x[here]).max()
        assert scale[block] == (np.float32(top / np.float32(448 if kind == "fp8" else 127)) if top else 1)
        step = top / 14 if kind == "fp8" else top / 127  # from 256 to 448 e4m3 numbers are 32 apart
        assert np.abs(back[here] - x[here]).max() <= step / 2 * 1.001 + 1e-30
        assert np.abs(back[here]).max() == pytest.approx(top)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss", "deepseek_v3", "deepseek_v4", "qwen3"])
def test_quantizing_while_loading(name: str, kind: str, layout):
    plain = load_model(GOLDEN / name, policy(layout, "float32"))
    model = load_model(GOLDEN / name, policy(layout, "float32"), quantization=kind)
    old, new = flatten(plain.params["params"]), flatten(model.params["params"])
    for path, leaf in new.items():
        if isinstance(leaf, Quantized):
            assert leaf.format.kind == kind
            assert "/attention/" in path or "/ffn/" in path
            assert leaf.shape == old[path].shape
            step = np.abs(old[path]).max() / 16
            np.testing.assert_allclose(wide(leaf), old[path], rtol=0, atol=step, err_msg=path)
        else:
            np.testing.assert_array_equal(leaf, old[path])
    names = {path.rpartition("/")[2] for path, leaf in new.items() if not isinstance(leaf, Quantized)}
    assert not {
        n for n in names if n.startswith(("gate_up_D2F", "down_FD", "gate_up_ED", "down_EFD", "qkv_DGQC", "q_b"))
    }
    assert {n for n in names if n.startswith(("embed_VD", "head_DV", "norm_D", "router_DE"))} >= {"embed_VD", "norm_D"}


def test_int8_scales_belong_to_outputs():
    model = load_model(GOLDEN / "qwen2_moe", policy(LAYOUTS[0]), quantization="int8")
    layer = model.params["params"]["layers_0"]
    (d, g, q, c), (h, k, _) = layer["attention"]["qkv_DGQC"].shape, layer["attention"]["out_HCD"].shape
    assert layer["attention"]["qkv_DGQC"].scale.shape == (1, g, q, c)
    assert layer["attention"]["out_HCD"].scale.shape == (h, 1, d)
    assert layer["ffn"]["gate_up_ED2F"].format.blocks == (d, 1, 1)
    assert k == layer["attention"]["out_HCD"].format.blocks[1]


def test_quantizing_what_is_quantized():
    same = load_model(GOLDEN / "deepseek_v3_fp8", policy(), quantization="fp8")
    assert same.net == load_model(GOLDEN / "deepseek_v3_fp8", policy()).net
    for name, kind, published in (
        ("deepseek_v3_fp8", "int8", "fp8"),
        ("gpt_oss_mxfp4", "fp8", "fp4"),
        ("deepseek_v4_fp4", "fp8", "fp4, fp8"),
    ):
        with pytest.raises(ConfigError, match=f"quantization={kind}.* published as {published}; use auto"):
            load_model(GOLDEN / name, policy(), quantization=kind)


@pytest.mark.parametrize("kind", ["int4", "", "FP8", None])
def test_unknown_quantization(kind):
    with pytest.raises(ConfigError, match="known are auto, none, fp8, int8"):
        load_model(GOLDEN / "qwen3", policy(), quantization=kind)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(
    "of", [spec({"num_hidden_layers": 2}), spec(LATENT), spec(ROUTED), spec(last=True, join="product")],
    ids=["two layers", "latent", "routed", "product"],
)  # fmt: skip
def test_a_head_is_quantized_whole(tmp_path: Path, of, kind: str):
    save_head(head(of), tmp_path)
    plain, small = load_head(tmp_path, TARGET, FLOAT32), load_head(tmp_path, TARGET, FLOAT32, quantization=kind)
    old, new = (flatten(some.params["params"]) for some in (plain, small))
    for path, leaf in new.items():
        if isinstance(leaf, Quantized):
            assert leaf.format.kind == kind
            np.testing.assert_allclose(wide(leaf), old[path], rtol=0, atol=np.abs(old[path]).max() / 16, err_msg=path)
    left = {path for path, leaf in new.items() if not isinstance(leaf, Quantized) and np.ndim(leaf) > 1}
    assert left <= {"first/ffn/router_DE", "layers_0/ffn/router_DE"}
    widened = {path: wide(leaf) if isinstance(leaf, Quantized) else leaf for path, leaf in new.items()}
    wanted = logits(replace(plain, params={"params": unflatten(widened)}))
    np.testing.assert_allclose(logits(small), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(wanted - logits(plain)).max() > 0
