"""Layers of multi-token prediction: which layer each family has there, and under which names it is published."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.load.block_scales import E4M3
from jaxspec.checkpoint.load.model import load_model, load_mtp
from jaxspec.checkpoint.load.release import release_tensors
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.ffn import FfnSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.policy import make_policy

ROOT = Path(__file__).parents[3]
GOLDEN, PUBLISHED = ROOT / "tests/golden", ROOT / "configs/models"
POLICY = make_policy(jnp.float32)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    file = GOLDEN / name / "config.json"
    config = json.loads((file if file.exists() else PUBLISHED / f"{name}.json").read_text()) | changes
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize(
    ("name", "layers", "tensors", "millions"),
    [
        # Three matrices of each of 512 experts, and 17 tensors besides.
        ("qwen3-next-80b-a3b", 1, 1553, 1650.5),
        # As in Qwen3.6-35B-A3B; Qwen3.5-35B-A3B has the 785 of its experts one by one.
        ("qwen3.5-35b-a3b", 1, 19, 844.6),
        # MiMo-V2-Flash's report: 0.33 billion parameters each.
        ("mimo-v2-flash", 3, 3 * 14, 3 * 329.27),
        # A head of 528 million in each.
        ("step-3.5-flash", 3, 3 * 17, 3 * 809.39),
        ("longcat-flash", 1, 16, 392.6),
        ("ling-3", 1, 1553, 3072.2),
        ("nemotron-3-nano-30b-a3b", 0, 0, 0),
        ("mellum-2-12b", 0, 0, 0),
    ],
)
def test_published_configs(name: str, layers: int, tensors: int, millions: float):
    config = config_of(name)
    assert len(arch_of(config).mtp) == layers
    behind = [tensor for tensor in release_tensors(config).values() if tensor.is_mtp]
    assert len(behind) == tensors
    assert sum(np.prod(tensor.shape) for tensor in behind) / 1e6 == pytest.approx(millions, abs=0.05)


def test_mellum_with_the_layer_that_its_report_describes():
    behind = [x for x in release_tensors(config_of("mellum-2-12b", num_mtp_layers=1)).values() if x.is_mtp]
    assert len(behind) == 3 * 64 + 13
    assert sum(np.prod(tensor.shape) for tensor in behind) / 1e6 == pytest.approx(428.4, abs=0.05)


def test_the_layer_has_the_attention_of_a_kind():
    """Not that of the layer before: the last ones of these models are recurrent, full, or have no attention."""
    for name, kind in (
        ("qwen3_5_moe", 1),
        ("exaone_moe", 0),
        ("nemotron_h", 2),
        ("longcat_flash", 0),
        ("mellum", 0),
        ("step3p7", 0),
        ("bailing_hybrid", 2),
    ):
        arch = arch_of(config_of(name))
        assert [layer.attention for layer in arch.mtp] == [arch.layers[kind].attention], name
    lists = {"hybrid_layer_pattern": [1, 0], "layer_types": ["sliding_attention", "full_attention"]}
    near = arch_of(config_of("mimo_v2_flash", **lists))
    assert near.mtp[0].attention == near.layers[0].attention != near.layers[1].attention
    full = arch_of(config_of("mellum", layer_types=["full_attention"] * 2))
    assert full.mtp[0].attention == arch_of(config_of("mellum")).layers[0].attention != full.layers[0].attention


def test_lists_of_step_speak_of_the_layers_of_prediction():
    step = arch_of(config_of("step3p5", layer_types=["sliding_attention"] * 4 + ["full_attention"]))
    assert [layer.attention.heads for layer in step.mtp] == [6, 4]
    assert [layer.ffn.activation.limit for layer in step.mtp] == [None, 0.4]
    # A copy that was saved again has lists of the model's layers alone: no layer of prediction is read.
    short = {key: config_of("step3p5")[key][:3] for key in ("layer_types", "rope_theta", "partial_rotary_factors")}
    assert not arch_of(config_of("step3p5", **short)).mtp
    for key in ("rope_theta", "partial_rotary_factors", "swiglu_limits_shared"):
        with pytest.raises(ConfigError, match=rf"config: {key} must .* for each of 4 layers"):
            arch_of(config_of("step3p5", **{key: config_of("step3p5")[key][:3]}))


def test_experts_of_the_layer():
    kinds = {
        name: type(arch_of(config_of(name)).mtp[0].ffn)
        for name in (
            "qwen3_next",
            "qwen3_5_moe",
            "nemotron_h",
            "hy_v3",
            "mellum",
            "bailing_hybrid",
            "step3p5",
            "exaone_moe",
            "mimo_v2_flash",
            "longcat_flash",
            "ernie4_5_moe",
        )
    }
    routed = ("qwen3_next", "qwen3_5_moe", "nemotron_h", "hy_v3", "mellum", "bailing_hybrid")
    assert kinds == {name: MoeSpec if name in routed else FfnSpec for name in kinds}
    assert arch_of(config_of("longcat_flash")).mtp[0].second is None


def test_numbers_of_layers():
    assert len(arch_of(config_of("mimo_v2_flash", num_nextn_predict_layers=...)).mtp) == 3
    assert len(arch_of(config_of("mellum", num_nextn_predict_layers=..., num_mtp_layers=1)).mtp) == 1
    assert not arch_of(config_of("mellum", num_nextn_predict_layers=...)).mtp
    for name in ("qwen3_next", "mimo_v2_flash", "longcat_flash"):
        assert not arch_of(config_of(name, num_nextn_predict_layers=0)).mtp
    assert not arch_of(config_of("qwen3_5_moe_text")).mtp
    assert len(arch_of(config_of("qwen3_5_moe_text", mtp_num_hidden_layers=1)).mtp) == 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nemotron_h", {"mtp_hybrid_override_pattern": "*M"}),
        ("nemotron_h", {"mtp_layers_block_type": ["mamba", "moe"]}),
        ("exaone_moe", {"mtp_layer_types": ["full_attention"]}),
        ("exaone_moe", {"mtp_sliding_windows": [512]}),
        ("mellum", {"mtp_layer_types": ["full_attention"]}),
        ("mellum", {"mtp_mlp_layer_types": ["dense"]}),
        ("qwen3_5_moe_text", {"mtp_use_dedicated_embeddings": True}),
    ],
)
def test_layers_of_another_kind_are_refused(name: str, changes: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        arch_of(config_of(name, **changes))


def test_a_family_without(tmp_path: Path):
    model = load_model(GOLDEN / "solar_open", POLICY)
    with pytest.raises(ConfigError, match=r"solar_open\) has no layers of .* \(none are read of this family\)"):
        load_mtp(GOLDEN / "solar_open", model.net)
    model = load_model(GOLDEN / "minimax_m2", POLICY)
    shutil.copy(PUBLISHED / "minimax-m2.json", tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"minimax_m2\) promises layers of .* \(num_mtp_modules\), but none are read"):
        load_mtp(tmp_path, model.net)
    short = {"layer_types": config_of("step3p5")["layer_types"][:3]}
    (tmp_path / "config.json").write_text(json.dumps(config_of("step3p5", **short)))
    step = Transformer(arch_of(config_of("step3p5", **short)), POLICY)
    with pytest.raises(ConfigError, match=r"\(num_nextn_predict_layers, and layer_types must name them, too\)"):
        load_mtp(tmp_path, step)
    model = load_model(GOLDEN / "qwen3_5_moe_text", POLICY)
    with pytest.raises(ConfigError, match=r"has no layers of multi-token prediction \(mtp_num_hidden_layers\)"):
        load_mtp(GOLDEN / "qwen3_5_moe_text", model.net)


def one_by_one(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Tensors whose stacks of experts under a prefix are taken apart, as quantized releases of Qwen3.5 have them."""
    out = {}
    for name, x in tensors.items():
        stem, stacked, part = name.rpartition("experts.")
        if not (stacked and name.startswith(prefix) and x.ndim == 3):
            out[name] = x
            continue
        for e, matrix in enumerate(x):
            halves = np.split(matrix, 2) if part == "gate_up_proj" else [matrix]
            for key, half in zip(("gate_proj", "up_proj") if len(halves) == 2 else (part,), halves, strict=True):
                out[f"{stem}experts.{e}.{key}.weight"] = np.ascontiguousarray(half)
    return out


@pytest.mark.parametrize("prefix", ["mtp.", ""])
def test_experts_one_by_one_are_those_of_a_stack(prefix: str, tmp_path: Path):
    """Qwen3.5 stacks the experts of its layers and not those of its prediction; where it is quantized, none."""
    source = GOLDEN / "qwen3_5_moe"
    tensors = one_by_one(load_file(source / "model.safetensors"), prefix)
    assert sum(".experts." in name for name in tensors) == (12 + 2 * 3 if prefix else 12 * 4)
    shutil.copy(source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    for directory in (source, tmp_path):
        model = load_model(directory, POLICY)
        params = model.params, load_mtp(directory, model.net)[1]
        if directory == source:
            wanted = params
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), params, wanted))


def test_prediction_that_a_quantized_release_leaves_wide(tmp_path: Path):
    """Experts of the layers in fp8, as Qwen3.5-35B-A3B-FP8 has them, and prediction in bfloat16: both as they are."""
    source = GOLDEN / "qwen3_5_moe"
    tensors, quantized = one_by_one(load_file(source / "model.safetensors"), ""), {}
    for name, x in tensors.items():
        if ".experts." in name and not name.startswith("mtp."):
            quantized[f"{name}_scale_inv"] = np.full((1, 1), 0.25, np.float32)
            x = (x.astype(np.float32) * 4).astype(E4M3)
        quantized[name] = x
    config = json.loads((source / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["mtp"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    save_file(quantized, tmp_path / "model.safetensors")
    model = load_model(tmp_path, make_policy(ml_dtypes.bfloat16))
    assert model.net.policy.storage.format_of("ffn/down_EFD") is not None
    mtp, params = load_mtp(tmp_path, model.net)
    assert not mtp.policy.storage.formats
    wide = {str(x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "down_EFD"}
    assert wide == {"bfloat16"}
    assert Counter(str(x.dtype) for x in quantized.values())["float8_e4m3fn"] == 36
