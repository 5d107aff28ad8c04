"""Packed weights of other libraries: what they stand for is exact, kept small in memory or widened."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.load.places import flatten
from jaxspec.checkpoint.load.release import release_tensors
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.nn.policy import make_policy
from pallas_kernels.quantized import Quantized

SOURCE = Path(__file__).parents[2] / "golden" / "qwen2_moe"
E4M3 = ml_dtypes.float8_e4m3fn
GROUP = 8  # divides every matrix of the source
E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Tensors = dict[str, np.ndarray]
Encoded = tuple[Tensors, np.ndarray]  # under the endings of a name, and what they stand for in float32
rng = np.random.default_rng(0)


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs whole numbers along the last axis, the first into the lowest bits."""
    per = 32 // bits
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % per)])
    grouped = numbers.reshape(*numbers.shape[:-1], -1, per).astype(np.uint64)
    shifted = np.stack([grouped[..., i] << np.uint64(bits * i) for i in range(per)])
    return shifted.sum(axis=0).astype(np.uint32).view(np.int32)


def scales(*shape: int) -> np.ndarray:
    return rng.uniform(0.001, 0.02, shape).astype(np.float16)


def compressed_int4(shape: tuple[int, int]) -> Encoded:
    number, scale = rng.integers(-8, 8, shape), scales(shape[0], shape[1] // GROUP)
    tensors = {"weight_packed": words(number + 8, 4), "weight_scale": scale, "weight_shape": np.array(shape)}
    return tensors, number.astype(np.float32) * np.repeat(scale.astype(np.float32), GROUP, 1)


def compressed_int4_with_zeros(shape: tuple[int, int]) -> Encoded:
    number, scale = rng.integers(-8, 8, shape), scales(shape[0], shape[1] // GROUP)
    zero = rng.integers(-8, 8, scale.shape)
    tensors = {
        "weight_packed": words(number + 8, 4), "weight_scale": scale, "weight_shape": np.array(shape),
        "weight_zero_point": words((zero + 8).T, 4).T.copy(),
    }  # fmt: skip
    return tensors, (number - np.repeat(zero, GROUP, 1)).astype(np.float32) * np.repeat(
        scale.astype(np.float32), GROUP, 1
    )


def int8_per_channel(shape: tuple[int, int]) -> Encoded:
    number, scale = rng.integers(-128, 128, shape).astype(np.int8), scales(shape[0], 1)
    return {"weight": number, "weight_scale": scale}, number.astype(np.float32) * scale.astype(np.float32)


def fp8(shape: tuple[int, int], *scale_shape: int) -> Encoded:
    number = rng.normal(0, 20, shape).astype(E4M3)
    scale = rng.uniform(0.001, 0.002, scale_shape).astype(np.float32)
    tensors = {"weight": number, "weight_scale": scale, "input_scale": np.ones((), np.float32)}
    return tensors, number.astype(np.float32) * scale


def fp8_per_channel(shape: tuple[int, int]) -> Encoded:
    return fp8(shape, shape[0], 1)


def fp8_per_tensor(shape: tuple[int, int]) -> Encoded:
    return fp8(shape)


def nvfp4(shape: tuple[int, int], *, divides: bool) -> Encoded:
    code = rng.integers(0, 16, shape).astype(np.uint8)
    scale = rng.uniform(1, 400, (shape[0], shape[1] // 16)).astype(E4M3)
    whole = np.float32(3e4) if divides else np.float32(3.7e-5)
    factor = scale.astype(np.float32) / whole if divides else scale.astype(np.float32) * whole
    packed = code[:, ::2] | code[:, 1::2] << 4
    tensors: Tensors = {"weight_scale": scale}
    if divides:
        tensors |= {"weight_packed": packed, "weight_global_scale": np.array([whole])}
    else:
        tensors |= {"weight": packed, "weight_scale_2": np.array(whole), "input_scale": np.array(whole)}
    return tensors, E2M1[code] * np.repeat(factor, 16, 1)


def awq(shape: tuple[int, int]) -> Encoded:
    rows, columns = shape
    number, zero = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (columns // GROUP, rows))
    scale = scales(columns // GROUP, rows)

    def packed(x: np.ndarray) -> np.ndarray:
        # The order in which AutoAWQ puts eight neighbors into a word.
        return words(x.reshape(len(x), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(x), -1), 4)

    tensors = {"qweight": packed(number), "qzeros": packed(zero), "scales": scale}
    wide = (number - np.repeat(zero, GROUP, 0)).astype(np.float32) * np.repeat(scale.astype(np.float32), GROUP, 0)
    return tensors, wide.T.copy()


def gptq(shape: tuple[int, int], bits: int = 4, *, shuffled: bool = False) -> Encoded:
    rows, columns = shape
    middle = 2 ** (bits - 1)
    number = rng.integers(0, 2**bits, (columns, rows))
    zero = (
        np.full((columns // GROUP, rows), middle) if bits == 8 else rng.integers(1, 2**bits, (columns // GROUP, rows))
    )
    scale, group = scales(columns // GROUP, rows), np.arange(columns) // GROUP
    if shuffled:
        group = rng.permutation(group)
    tensors = {
        "qweight": words(number.T, bits).T.copy(), "qzeros": words(zero - 1, bits), "scales": scale,
        "g_idx": group.astype(np.int32),
    }  # fmt: skip
    return tensors, ((number - zero[group]).astype(np.float32) * scale.astype(np.float32)[group]).T.copy()


LAYOUTS: dict[str, tuple[Callable[[tuple[int, int]], Encoded], dict]] = {
    "compressed int4": (compressed_int4, {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "compressed int4 with zeros": (compressed_int4_with_zeros, {"quant_method": "compressed-tensors"}),
    "int8 per channel": (int8_per_channel, {"quant_method": "compressed-tensors", "format": "int-quantized"}),
    "fp8 per channel": (fp8_per_channel, {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    "fp8 per tensor": (fp8_per_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nvfp4 of compressed-tensors": (lambda s: nvfp4(s, divides=True), {"quant_method": "compressed-tensors"}),
    "nvfp4 of modelopt": (lambda s: nvfp4(s, divides=False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq of 8 bits": (lambda s: gptq(s, 8), {"quant_method": "gptq", "bits": 8}),
    "gptq in another order": (lambda s: gptq(s, shuffled=True), {"quant_method": "gptq", "bits": 4}),
}


def written(
    directory: Path, layout: str, edit: Callable[[Tensors], None] = lambda _: None, **settings: object
) -> Path:  # fmt: skip
    """A packed checkpoint at ``directory``, and one of the plain numbers that it stands for at ``directory/plain``."""
    encode, method = LAYOUTS[layout]
    config = json.loads((SOURCE / "config.json").read_text())
    packed, plain = {}, {}
    for name, array in TensorFiles.of(SOURCE).items():
        stem = name.removesuffix(".weight")
        if array.ndim == 2 and "_proj" in name and array.shape[1] % 16 == 0:
            tensors, plain[name] = encode(array.shape)
            packed |= {f"{stem}.{ending}": tensor for ending, tensor in tensors.items()}
        else:
            packed[name] = plain[name] = np.array(array)
    edit(packed)
    (directory / "plain").mkdir()
    save_file(packed, directory / "model.safetensors")
    save_file(plain, directory / "plain" / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": method | settings}))
    (directory / "plain" / "config.json").write_text(json.dumps(config))
    return directory


def widened(directory: Path, quantization: str = "auto") -> tuple[dict[str, np.ndarray], set[str]]:
    """Parameters in float32, and the kinds of those that stayed quantized."""
    params = flatten(load_model(directory, make_policy("float32"), quantization=quantization).params["params"])
    small = {w.format.kind for w in params.values() if isinstance(w, Quantized)}
    wide = {k: np.asarray(w.widen(np.float32) if isinstance(w, Quantized) else w) for k, w in params.items()}
    return wide, small


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_exact_kept_or_widened(layout: str, tmp_path: Path):
    directory = written(tmp_path, layout)
    right, _ = widened(directory / "plain")
    kinds = set() if "another order" in layout else {"fp8"} if "fp8" in layout else {"int8"}
    for quantization, expected in (("auto", kinds), ("none", set())):
        params, small = widened(directory, quantization)
        assert small == expected
        jax.tree.map(np.testing.assert_array_equal, params, right)


@pytest.mark.parametrize(
    ("layout", "edit", "settings", "error", "words"),
    [
        ("awq", {}, {"version": "gemv"}, ConfigError, "version 'gemv' is not supported; supported are .'gemm'"),
        ("gptq", {}, {"bits": 3}, ConfigError, "bits 3 is not supported"),
        ("gptq", {}, {"checkpoint_format": "gptq_v2"}, ConfigError, "gptq_v2"),
        ("compressed int4", {}, {"format": "marlin-24"}, ConfigError, "marlin-24"),
        ("awq", {"scales": None}, {}, CheckpointError, "scales of its packed weight is missing"),
        ("gptq", {"qzeros": None}, {}, CheckpointError, "qzeros of its packed weight is missing"),
        ("nvfp4 of modelopt", {"weight_scale": np.ones((3, 1), E4M3)}, {}, CheckpointError, "do not fit a weight"),
        ("int8 per channel", {"weight_zero_point": np.ones(1, np.int8)}, {}, CheckpointError, "symmetric int8 is"),
    ],
)
def test_what_is_not_supported_is_named(
    layout: str, edit: dict, settings: dict, error: type, words: str, tmp_path: Path
):
    stem = "model.layers.0.self_attn.q_proj"

    def change(tensors: Tensors) -> None:
        for ending, value in edit.items():
            if value is None:
                del tensors[f"{stem}.{ending}"]
            else:
                tensors[f"{stem}.{ending}"] = value

    with pytest.raises(error, match=words):
        load_model(written(tmp_path, layout, change, **settings), make_policy("float32"))


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
GROUPS = {"config_groups": {"group_0": {"weights": WEIGHTS}}, "ignore": ["lm_head", "re:.*gate$"]}
PROMISES = {
    "compressed int4": GROUPS,
    "nvfp4 of compressed-tensors": {
        "config_groups": {"a": {"weights": {**WEIGHTS, "type": "float", "group_size": 16}}}
    },
    "int8 per channel": {"config_groups": {"a": {"weights": {**WEIGHTS, "num_bits": 8, "strategy": "channel"}}}},
    "fp8 per channel": {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
    "nvfp4 of modelopt": {},
    "awq": {"group_size": GROUP},
    "gptq": {"group_size": GROUP},
}


@pytest.mark.parametrize("layout", PROMISES)
def test_a_config_promises_what_is_published(layout: str, tmp_path: Path):
    directory = written(tmp_path, layout, **PROMISES[layout])
    promised = release_tensors(json.loads((directory / "config.json").read_text()))
    files = TensorFiles.of(directory)
    known = ("weight_shape", "input_scale", "g_idx")
    some = {name for name in files if not name.endswith(known) and ".shared_expert.down_proj" not in name}
    assert some <= set(promised)
    for name in some:
        if "scale" not in name:  # whose dtype is the packer's choice
            assert (promised[name].shape, promised[name].dtype) == (
                files.tensors[name].shape,
                files.tensors[name].dtype,
            )
        elif files.tensors[name].shape:
            assert promised[name].shape == files.tensors[name].shape
