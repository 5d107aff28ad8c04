"""Quantized checkpoints: found by their scales, kept or widened exactly, refused where they are not understood."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.block_scales import block_scales, dequantize, quantize
from jaxspec.checkpoint.load.model import load_model, plan_model
from jaxspec.checkpoint.load.places import abstract_params, flatten
from jaxspec.checkpoint.load.save import export_tensors
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import Policy, make_policy
from pallas_kernels.quantized import Format, Quantized

GOLDEN = Path(__file__).parents[2] / "golden"
QUANTISED = ("deepseek_v3_fp8", "deepseek_v4_fp4", "gpt_oss_mxfp4")
LAYOUTS = ("unrolled", "stacked")
FP4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FINITE = np.asarray([b for b in range(256) if b & 127 != 127], np.uint8)
E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, jnp.dtype("bfloat16")


def policy(layout=LAYOUTS[0], dtype: str = "bfloat16") -> Policy:
    return make_policy(dtype, depth=layout)


def edited(source: Path | str, tmp_path: Path, edit: Callable[[dict], None] = lambda _: None, **config) -> Path:
    """A checkpoint with some of its tensors or config keys changed."""
    source = GOLDEN / source
    tensors = {key: np.array(value) for key, value in TensorFiles.of(source).items()}
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((source / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return tmp_path


def grown(name: str, **config) -> tuple[dict, dict[str, np.ndarray]]:
    """A golden's config with other sizes, and random tensors for it."""
    config = json.loads((GOLDEN / name / "config.json").read_text()) | config
    net, rng = Transformer(arch_of(config), policy(LAYOUTS[1])), np.random.default_rng(0)
    shapes = abstract_params(net)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.02, leaf.shape).astype(leaf.dtype), shapes)
    return config, export_tensors({"params": params}, net.arch, np.dtype(BF16))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints whose matrices are no multiples of blocks and whose heads cut through them."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("fp8", "mxfp4")}
    sizes = {"hidden_size": 192, "q_lora_rank": 136, "kv_lora_rank": 128, "intermediate_size": 300}
    heads = {"qk_nope_head_dim": 40, "qk_rope_head_dim": 8, "v_head_dim": 72, "moe_intermediate_size": 160}
    config, tensors = grown("deepseek_v3_fp8", **sizes, **heads)
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj" in name]:
        wide, form = tensors[name].astype(np.float32), Format("fp8", (128, 128))
        wide *= rng.lognormal(size=(len(wide), 1)).astype(np.float32)
        tensors[name + "_scale_inv"] = block_scales(wide, form)
        tensors[name] = quantize(wide, tensors[name + "_scale_inv"], form)
    save_file(tensors, found["fp8"] / "model.safetensors")
    (found["fp8"] / "config.json").write_text(json.dumps(config))
    config, tensors = grown("gpt_oss_mxfp4", hidden_size=96, intermediate_size=64)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        tensors[name + "_blocks"] = rng.integers(0, 256, (experts, out, width // 32, 16), dtype=np.uint8)
        tensors[name + "_scales"] = rng.integers(118, 125, (experts, out, width // 32), dtype=np.uint8)
    save_file(tensors, found["mxfp4"] / "model.safetensors")
    (found["mxfp4"] / "config.json").write_text(json.dumps(config))
    return found


def wide(leaf: Quantized) -> np.ndarray:
    """What a parameter stands for, by plain numpy."""
    form, data, scale = leaf.format, np.asarray(leaf.data), np.asarray(leaf.scale)
    if form.kind == "fp4":
        axis = data.ndim + form.packed_axis
        data = FP4[np.stack([data & 15, data >> 4], axis + 1).reshape(leaf.shape)]
    if form.exponent_scales:
        scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127).astype(np.float32)
    for axis, block in enumerate(form.blocks, start=data.ndim - len(form.blocks)):
        scale = scale.take(np.arange(data.shape[axis]) // block, axis)
    return data.astype(np.float32) * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(192, 192), (576, 512), (136, 192), (128, 128), (5, 130)], ids=str)
def test_fp8_blocks_by_plain_numpy(shape: tuple[int, int], dtype: str):
    rng = np.random.default_rng(0)
    numbers = rng.choice(FINITE, shape).view(E4M3)
    form = Format("fp8", (128, 128))
    scale = rng.lognormal(size=(-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    wanted = np.empty(shape, dtype)
    for n in range(shape[0]):
        row = np.asarray([scale[n // 128, k // 128] for k in range(shape[1])])
        wanted[n] = (numbers[n].astype(np.float32) * row).astype(dtype)
    assert dequantize(numbers, scale, form, np.dtype(dtype)).tobytes() == wanted.tobytes()
    exponents = rng.integers(90, 160, scale.shape, dtype=np.uint8)
    factor = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    same = dequantize(numbers, factor, form, np.dtype(dtype))
    power = dequantize(numbers, exponents, Format("fp8", (128, 128), True), np.dtype(dtype))
    assert power.tobytes() == same.tobytes()


@pytest.mark.parametrize("turned", [False, True], ids=["deepseek_v4", "gpt_oss"])
def test_fp4_by_plain_numpy(turned: bool):
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 256, (200, 96), dtype=np.uint8)  # [N, K / 2]
    exponents = rng.integers(0, 252, (200, 6), dtype=np.uint8)
    wanted = np.empty((200, 192), np.float32)
    for k in range(192):
        half = numbers[:, k // 2] & 15 if k % 2 == 0 else numbers[:, k // 2] >> 4
        wanted[:, k] = FP4[half] * np.ldexp(np.float32(1), exponents[:, k // 32].astype(np.int32) - 127)
    if turned:
        form = Format("fp4", (32, 1), exponent_scales=True, packed_axis=-2)
        got = dequantize(numbers.T, exponents.T, form, np.dtype(np.float32)).T
    else:
        form = Format("fp4", (1, 32), exponent_scales=True, packed_axis=-1)
        got = dequantize(numbers, exponents, form, np.dtype(np.float32))
    np.testing.assert_array_equal(got, wanted)


def compare(directory: Path, layout, dtype: str) -> None:
    """Every weight that is kept against what widening while loading gives."""
    kept = load_model(directory, policy(layout, dtype))
    plain = load_model(directory, policy(layout, dtype), quantization="none")
    assert plain.net.policy.storage.formats == ()
    old, new = flatten(plain.params["params"]), flatten(kept.params["params"])
    assert set(old) == set(new)
    assert sum(isinstance(leaf, Quantized) for leaf in new.values()) >= 2
    for path, leaf in new.items():
        assert not isinstance(old[path], Quantized)
        whole = wide(leaf).astype(dtype) if isinstance(leaf, Quantized) else np.asarray(leaf)
        assert whole.tobytes() == np.asarray(old[path]).tobytes(), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", QUANTISED)
def test_kept_weights_are_what_was_published(name: str, dtype: str):
    compare(GOLDEN / name, LAYOUTS[0], dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_kept_weights_of_ragged_sizes(name: str, layout, ragged: dict[str, Path]):
    compare(ragged[name], layout, "float32")


def test_every_way_to_a_published_number(ragged: dict[str, Path]):
    """Leaves against the tensors themselves, without the loader's own packs."""
    files, model = TensorFiles.of(ragged["fp8"]), load_model(ragged["fp8"], policy(dtype="float32"))
    layer = model.params["params"]["layers_1"]
    at, ffn = layer["attention"], layer["ffn"]
    heads = at["q_b_RHC"].shape[1]
    pairs = {
        "self_attn.q_a_proj": wide(at["q_a_DR"]).T,
        "self_attn.q_b_proj": wide(at["q_b_RHC"]).reshape(136, heads * 48).T,
        "self_attn.kv_a_proj_with_mqa": wide(at["kv_a_DX"]).T,
        "self_attn.kv_b_proj": wide(at["kv_b_HXR"]).reshape(heads * 112, 128),
        "self_attn.o_proj": wide(at["out_HCD"]).reshape(heads * 72, 192).T,
        "mlp.experts.1.gate_proj": wide(ffn["gate_up_ED2F"])[1][:, 0].T,
        "mlp.experts.1.up_proj": wide(ffn["gate_up_ED2F"])[1][:, 1].T,
        "mlp.experts.1.down_proj": wide(ffn["down_EFD"])[1].T,
    }
    for name, got in pairs.items():
        numbers, scale = files[f"model.layers.1.{name}.weight"], files[f"model.layers.1.{name}.weight_scale_inv"]
        rows, columns = (np.arange(n) // 128 for n in numbers.shape)
        wanted = numbers.astype(np.float32) * scale[rows[:, None], columns[None]]
        np.testing.assert_array_equal(got, wanted, err_msg=name)


def test_what_stays_quantized():
    formats = dict(load_model(GOLDEN / "deepseek_v3_fp8", policy()).net.policy.storage.formats)
    assert set(formats) == {
        "attention/q_a_DR", "attention/q_b_RHC", "attention/kv_a_DX", "attention/kv_b_HXR", "attention/out_HCD",
        "ffn/gate_up_D2F", "ffn/down_FD", "ffn/gate_up_ED2F", "ffn/down_EFD",
        "ffn/shared/gate_up_D2F", "ffn/shared/down_FD",
    }  # fmt: skip
    assert formats["attention/q_a_DR"] == Format("fp8", (128, 128))
    assert formats["ffn/gate_up_ED2F"] == Format("fp8", (128, 1, 128))
    formats = dict(load_model(GOLDEN / "gpt_oss_mxfp4", policy(LAYOUTS[1])).net.policy.storage.formats)
    assert formats == {
        "ffn/gate_up_ED2F": Format("fp4", (32, 1, 1), exponent_scales=True, packed_axis=-3),
        "ffn/down_EFD": Format("fp4", (32, 1), exponent_scales=True, packed_axis=-2),
    }
    formats = dict(load_model(GOLDEN / "deepseek_v4_fp4", policy()).net.policy.storage.formats)
    assert formats["ffn/gate_up_ED2F"] == Format("fp4", (32, 1, 1), exponent_scales=True, packed_axis=-3)
    assert formats["ffn/shared/gate_up_D2F"] == Format("fp8", (128, 1, 128), exponent_scales=True)
    assert formats["attention/out_a_XC"] == Format("fp8", (128, 128), exponent_scales=True)


def test_kinds_whose_layers_differ_are_widened(ragged: dict[str, Path], tmp_path: Path):
    name = "model.layers.1.self_attn.o_proj.weight"

    def edit(tensors: dict) -> None:
        scale = tensors.pop(name + "_scale_inv")
        tensors[name] = dequantize(tensors[name], scale, Format("fp8", (128, 128)), np.dtype(BF16))

    model = load_model(edited(ragged["fp8"], tmp_path, edit), policy())
    whole = load_model(ragged["fp8"], policy(), quantization="none")
    assert "attention/out_HCD" not in dict(model.net.policy.storage.formats)
    assert "attention/q_a_DR" in dict(model.net.policy.storage.formats)
    for layer in ("layers_0", "layers_1"):
        got, wanted = (m.params["params"][layer]["attention"]["out_HCD"] for m in (model, whole))
        np.testing.assert_array_equal(got, wanted)


def test_scales_in_other_float_dtypes(ragged: dict[str, Path], tmp_path: Path):
    """Qwen3's are bfloat16; DeepSeek-V4's base checkpoints have float32 ones under V4's name."""

    def narrow(tensors: dict) -> None:
        tensors |= {name: value.astype(BF16) for name, value in tensors.items() if name.endswith("_scale_inv")}

    directory = edited(ragged["fp8"], tmp_path, narrow)
    scales = TensorFiles.of(directory)
    leaf = load_model(directory, policy()).params["params"]["layers_0"]["attention"]["q_a_DR"]
    wanted = scales["model.layers.0.self_attn.q_a_proj.weight_scale_inv"].astype(np.float32).T
    np.testing.assert_array_equal(leaf.scale, wanted)


def test_base_checkpoints_of_deepseek_v4(tmp_path: Path):
    """Experts are fp8 with float32 scales there."""
    plain = load_model(GOLDEN / "deepseek_v4_fp4", policy(dtype="float32"), quantization="none")

    def edit(tensors: dict) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            data = tensors[name.removesuffix("scale") + "weight"]
            if data.dtype != np.int8:
                tensors[name] = np.ldexp(np.float32(1), tensors[name].view(np.uint8).astype(np.int32) - 127)
                continue
            form = Format("fp4", (1, 32), exponent_scales=True, packed_axis=-1)
            wide = dequantize(data.view(np.uint8), tensors[name].view(np.uint8), form, np.dtype(np.float32))
            scale = 2.0 ** np.ceil(np.log2(block_scales(wide, Format("fp8", (128, 128)))))
            tensors[name] = scale.astype(np.float32)
            tensors[name.removesuffix("scale") + "weight"] = quantize(wide, tensors[name], Format("fp8", (128, 128)))

    model = load_model(edited("deepseek_v4_fp4", tmp_path, edit), policy(dtype="float32"))
    formats = dict(model.net.policy.storage.formats)
    assert formats["ffn/gate_up_ED2F"] == Format("fp8", (128, 1, 128))
    assert formats["attention/q_a_DR"] == Format("fp8", (128, 128))
    got, wanted = (m.params["params"]["layers_0"]["ffn"]["down_EFD"] for m in (model, plain))
    np.testing.assert_allclose(wide(got), wanted, atol=np.abs(wanted).max() / 16)
    got, wanted = (m.params["params"]["layers_0"]["attention"]["q_a_DR"] for m in (model, plain))
    np.testing.assert_array_equal(wide(got), wanted)


X = "model.layers.0.self_attn.q_a_proj.weight"
WRONG = {
    "no scales": (lambda t: t.pop(X + "_scale_inv"), f"1 missing: scales of {X}"),
    "grid": (
        lambda t: t.update({X + "_scale_inv": t[X + "_scale_inv"][:1]}),
        rf"{X}_scale_inv: \(1, 2\) in the file, \(2, 2\) by its weight's",
    ),
    "dtype of the scales": (
        lambda t: t.update({X + "_scale_inv": t[X + "_scale_inv"].astype(np.int32)}),
        f"1 of the wrong dtype: {X}_scale_inv: int32",
    ),
    "dtype of the numbers": (
        lambda t: t.update({X: t[X].astype(ml_dtypes.float8_e5m2)}),
        f"1 of the wrong dtype: {X}: float8_e5m2 with scales",
    ),
    "scales of nothing": (
        lambda t: t.update({"model.norm.weight_scale_inv": np.ones((1, 1), np.float32)}),
        "1 not known: model.norm.weight_scale_inv",
    ),
    "not a number": (lambda t: t[X].view(np.uint8).__setitem__((3, 5), 0xFF), f"{X}: .*not finite"),
    "infinite scale": (lambda t: t[X + "_scale_inv"].__setitem__((0, 1), np.inf), f"{X}_scale_inv: .*not finite"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_what_is_wrong_with_scales_is_said(what: str, quantization: str, ragged: dict[str, Path], tmp_path: Path):
    edit, words = WRONG[what]
    directory = edited(ragged["fp8"], tmp_path, edit)
    with pytest.raises(CheckpointError, match=words):
        load_model(directory, policy(), quantization=quantization)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t, n: t.pop(n + "_scales"), "1 missing: .*down_proj_scales"),
        (lambda t, n: t.update({n + "_scales": t[n + "_scales"][:, :, :1]}), r"down_proj_scales\[0\]: \(96, 1\) in"),
        (lambda t, n: t.update({n + "_blocks": np.repeat(t[n + "_blocks"], 2, 0)}), "down_proj_blocks: 8 entries in"),
        (lambda t, n: t[n + "_scales"].__setitem__((1, 2, 0), 255), r"down_proj_scales\[1\]: .*not finite"),
    ],
    ids=["no scales", "grid", "experts", "not a number"],
)
def test_what_is_wrong_with_packed_experts_is_said(edit, words: str, ragged: dict[str, Path], tmp_path: Path):
    name = "model.layers.1.mlp.experts.down_proj"
    directory = edited(ragged["mxfp4"], tmp_path, lambda tensors: edit(tensors, name))
    with pytest.raises(CheckpointError, match=words):
        load_model(directory, policy())


def test_everything_wrong_is_listed_at_once(tmp_path: Path):
    def edit(tensors: dict) -> None:
        del tensors[X], tensors["model.layers.1.self_attn.o_proj.weight_scale_inv"]

    with pytest.raises(CheckpointError) as caught:
        load_model(edited("deepseek_v3_fp8", tmp_path, edit), policy())
    assert f"2 missing: {X}, scales of model.layers.1.self_attn.o_proj.weight" in str(caught.value)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", None])
@pytest.mark.parametrize("inside", [False, True])
def test_other_ways_of_quantization_are_named(method: str | None, inside: bool, tmp_path: Path):
    settings: dict = {"quantization_config": {"quant_method": method, "bits": 4}}
    directory = edited("qwen3", tmp_path, **({"text_config": settings} if inside else settings))
    with pytest.raises(ConfigError, match=f"{method!r}.*supported are fp8"):
        load_model(directory, policy())


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("weight.absmax", "bitsandbytes"),
        ("SCB", "bitsandbytes 8-bit"),
    ],
)
def test_other_ways_of_quantization_are_seen_by_their_tensors(ending: str, words: str, tmp_path: Path):
    extra = {f"model.layers.0.mlp.down_proj.{ending}": np.ones((2, 2), np.int32)}
    with pytest.raises(CheckpointError, match=f"{words}.*supported are fp8"):
        load_model(edited("qwen3", tmp_path, lambda tensors: tensors.update(extra)), policy())


@pytest.mark.parametrize("block", [[128], [0, 128], "wide"])
def test_block_sizes_are_checked(block, tmp_path: Path):
    settings = {"quant_method": "fp8", "weight_block_size": block}
    with pytest.raises(ConfigError, match="weight_block_size"):
        plan_model(edited("deepseek_v3_fp8", tmp_path, quantization_config=settings), policy())


def test_block_sizes_of_the_config_count(tmp_path: Path):
    def edit(tensors: dict) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            weight = tensors[name.removesuffix("_scale_inv")]
            grid = (-(-weight.shape[0] // 64), -(-weight.shape[1] // 32))
            tensors[name] = np.ones(grid, np.float32)

    settings = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    model = load_model(edited("deepseek_v3_fp8", tmp_path, edit, quantization_config=settings), policy())
    assert dict(model.net.policy.storage.formats)["attention/q_a_DR"] == Format("fp8", (32, 64))


def test_copies_of_a_loaded_policy_load_other_models():
    """A draft model is loaded with its target's policy, whose formats are not its own."""
    target = load_model(GOLDEN / "deepseek_v3_fp8", policy())
    draft = load_model(GOLDEN / "qwen3", target.net.policy)
    assert draft.net.policy.storage.formats == ()
    jax.tree.map(lambda leaf: leaf.block_until_ready(), draft.params)
