"""What was loaded is written back bit for bit, quantized weights included."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.load.places import abstract_params
from jaxspec.checkpoint.load.save import export_tensors, save_model
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy

GOLDENS = sorted(file for file in (Path(__file__).parents[2] / "golden").glob("*/config.json"))
ORACLES = sorted(Path(os.environ.get("JAXSPEC_ORACLES", "-")).glob("*/hub_config.json"))
BF16 = jnp.dtype("bfloat16")
LAYOUTS = (pytest.param("unrolled", marks=pytest.mark.slow), "stacked")


def checkpoint(config: Path, tmp_path: Path) -> Path:
    """A directory with the config under its usual name."""
    shutil.copy(config, tmp_path / "config.json")
    shutil.copy(config.parent / "model.safetensors", tmp_path)
    return tmp_path


def golden(name: str) -> Path:
    return next(file for file in GOLDENS if file.parent.name == name)


def equal(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool(np.array_equal(x, y)), a, b))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", [*GOLDENS, *ORACLES], ids=lambda c: f"{c.parent.parent.name}-{c.parent.name}")
def test_round_trip(config: Path, layout, tmp_path: Path):
    source = checkpoint(config, tmp_path)
    model = load_model(source, make_policy(BF16, depth=layout))
    out = tmp_path / "out"
    save_model(out, model.params, model.net.arch, model.config, np.dtype(BF16))
    old, new, arch = TensorFiles.of(source), TensorFiles.of(out), model.net.arch
    after = tuple(f"model.layers.{len(arch.layers) + n}." for n in range(len(arch.mtp)))
    assert [name for name in set(old) ^ set(new) if not name.startswith((*after, "mtp.", "model.mtp"))] == []
    assert {n: (t.dtype, t.shape) for n, t in new.tensors.items()} == {
        n: (old.tensors[n].dtype, old.tensors[n].shape) for n in new
    }
    assert [name for name in new if old[name].tobytes() != new[name].tobytes()] == []
    assert json.loads((out / "config.json").read_text()) == json.loads(config.read_text())
    assert not (out / "model.safetensors.part").exists()
    again = load_model(out, make_policy(BF16, depth=layout))
    assert again.net == model.net
    assert equal(again.params, model.params)


def test_weights_quantized_here_are_published_like_others(tmp_path: Path):
    source = checkpoint(golden("qwen3_moe"), tmp_path)
    model = load_model(source, make_policy(BF16), quantization="fp8")
    out = tmp_path / "out"
    save_model(out, model.params, model.net.arch, model.config, np.dtype(BF16))
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    again = load_model(out, make_policy(BF16))
    assert again.net == model.net
    assert equal(again.params, model.params)


def test_what_no_layout_has_is_refused(tmp_path: Path):
    model = load_model(checkpoint(golden("qwen3_moe"), tmp_path), make_policy(BF16), quantization="int8")
    with pytest.raises(ConfigError, match="int8"):
        save_model(tmp_path / "out", model.params, model.net.arch, model.config, np.dtype(BF16))


def test_a_widened_model_is_published_as_plain(tmp_path: Path):
    source = checkpoint(golden("gpt_oss_mxfp4"), tmp_path)
    model = load_model(source, make_policy(BF16), quantization="none")
    save_model(tmp_path / "out", model.params, model.net.arch, model.config, np.dtype(BF16))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "model.layers.0.mlp.experts.down_proj" in TensorFiles.of(tmp_path / "out")
    assert equal(load_model(tmp_path / "out", make_policy(BF16)).params, model.params)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fresh_parameters_export_under_the_published_names(layout):
    config = golden("mixtral")
    arch = arch_of(json.loads(config.read_text()))
    shapes = abstract_params(Transformer(arch, make_policy(BF16, depth=layout)))
    params = {"params": jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)}
    out = export_tensors(params, arch, np.dtype(np.float16))
    assert {name: value.shape for name, value in out.items()} == {
        name: tensor.shape for name, tensor in TensorFiles.of(config.parent).tensors.items()
    }
    assert {value.dtype for value in out.values()} == {np.dtype(np.float16)}
