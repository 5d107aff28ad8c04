"""Checkpoint directories: what is wrong is said at once, what is right loads the same however it is cut up."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoint.files.stream import TensorFiles, TensorName
from jaxspec.checkpoint.load.model import load_model, load_mtp, plan_model
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.catalog import known_families
from jaxspec.nn.policy import make_policy
from jaxspec.sharding.mesh import make_mesh
from scripts.house_report import ROOT

GOLDENS = sorted(file.parent for file in (Path(__file__).parents[2] / "golden").glob("*/config.json"))
BF16 = jnp.dtype(ml_dtypes.bfloat16)


def golden(name: str) -> Path:
    return next(d for d in GOLDENS if d.name == name)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound checkpoint to be spoilt."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden("qwen2_moe") / name, tmp_path / name)
    return tmp_path


def load(directory: Path, layout: str = "unrolled"):
    return load_model(directory, make_policy(BF16, depth=layout))


def edit_config(directory: Path, **changes) -> None:
    config = json.loads((directory / "config.json").read_text())
    config |= changes
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def complaint(directory: Path, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        load(directory)
    return str(caught.value)


def test_missing_directory(tmp_path: Path):
    assert "no such directory" in complaint(tmp_path / "nowhere", ConfigError)


def test_a_file_is_no_model_directory(directory: Path):
    assert "a file, not a model directory" in complaint(directory / "config.json", ConfigError)


def test_missing_config(directory: Path):
    (directory / "config.json").unlink()
    assert "no config.json" in complaint(directory, ConfigError)


@pytest.mark.parametrize("text", ["{", "", "[1, 2]", "\x00"])
def test_corrupt_config(directory: Path, text: str):
    (directory / "config.json").write_text(text)
    assert "config.json" in complaint(directory, ConfigError)


@pytest.mark.parametrize(("model_type", "nearest"), [("bert", ""), (None, ""), (7, ""), ("qwen3moe", "qwen3_moe")])
def test_an_unknown_family_names_the_nearest_and_the_page_that_lists_all(directory: Path, model_type, nearest: str):
    edit_config(directory, model_type=model_type)
    text = complaint(directory, ConfigError)
    assert repr(model_type) in text
    assert sum(f" {family}" in text for family in known_families()) >= 6
    assert f" {nearest}" in text
    assert "docs/models.md" in text
    page = (ROOT / "docs" / "models.md").read_text()
    assert [family for family in known_families() if f"`{family}`" not in page] == []


def test_all_missing_keys_are_listed(directory: Path):
    missing = ("vocab_size", "num_experts", "moe_intermediate_size", "num_hidden_layers")
    edit_config(directory, **dict.fromkeys(missing))
    text = complaint(directory, ConfigError)
    assert [key for key in missing if key not in text] == []


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads"])
def test_a_missing_key_is_named_even_if_others_derive_from_it(directory: Path, key: str):
    edit_config(directory, **{key: None})
    assert key in complaint(directory, ConfigError)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_key_value_heads": 3}, "heads"),
        ({"num_experts_per_tok": 13}, "num_experts_per_tok"),
        ({"hidden_act": "swish9"}, "swish9"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ],
    ids=str,
)
def test_contradictory_config(directory: Path, changes: dict, word: str):
    edit_config(directory, **changes)
    assert word in complaint(directory, ConfigError)


def test_no_weights(directory: Path):
    (directory / "model.safetensors").unlink()
    assert "no .safetensors file" in complaint(directory, CheckpointError)


@pytest.mark.parametrize("size", [0, 5, 100, 0.5, 0.999])
def test_truncated_weights(directory: Path, size: float):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(size * len(data)) if isinstance(size, float) else size])
    assert "truncated" in complaint(directory, CheckpointError)


def with_header(file: Path, header: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 40,
        b"[1]",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [4]}}',
        b'{"x": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}',
        b'{"x": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}',
        b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}',
        b'{"x": {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]}}',
    ],
    ids=lambda h: h.decode("latin-1"),
)
def test_corrupt_header(directory: Path, header: bytes):
    with_header(directory / "model.safetensors", header)
    assert "model.safetensors" in complaint(directory, CheckpointError)


def shard(directory: Path) -> dict[str, str]:
    """Splits the weights into three shards with an index."""
    tensors = {name: np.asarray(value) for name, value in TensorFiles.of(directory).items()}
    files = [f"model-{n + 1:05}-of-00003.safetensors" for n in range(3)]
    places = {name: files[n % 3] for n, name in enumerate(tensors)}
    for file in files:
        save_file({name: value for name, value in tensors.items() if places[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def equal(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool(np.array_equal(x, y)), a, b))


def test_shards_load_like_one_file(directory: Path):
    whole = load(directory)
    shard(directory)
    assert equal(load(directory).params, whole.params)


def test_missing_shards_are_listed(directory: Path):
    gone = sorted(set(shard(directory).values()))[1:]
    for name in gone:
        (directory / name).unlink()
    text = complaint(directory, CheckpointError)
    assert all(name in text for name in gone)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {"x": 3}}'])
def test_corrupt_index(directory: Path, text: str):
    (directory / "model.safetensors.index.json").write_text(text)
    assert "index" in complaint(directory, CheckpointError)


def test_every_wrong_tensor_is_named_at_once(directory: Path):
    tensors = {name: np.asarray(value) for name, value in TensorFiles.of(directory).items()}
    missing = ["model.layers.0.mlp.experts.3.up_proj.weight", "model.norm.weight"]
    for name in missing:
        del tensors[name]
    tensors["model.layers.9.extra.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # old checkpoints hold it
    wrong = "model.layers.2.self_attn.q_proj.weight"
    tensors[wrong] = tensors[wrong][:-8]
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        directory / "model.safetensors",
    )
    text = complaint(directory, CheckpointError)
    assert "2 missing" in text
    assert "1 not known: model.layers.9.extra.weight" in text
    assert f"1 of the wrong shape: {wrong}: (24, 32) in the file, (32, 32) by the config" in text
    assert all(name in text for name in missing)
    assert "inv_freq" not in text


def test_other_files_beside_the_weights_are_left_alone(directory: Path):
    save_file({"unrelated": np.zeros(1, np.float32)}, directory / "consolidated.safetensors")
    load(directory)


def test_headers_alone_say_what_is_wrong(directory: Path):
    """The plan reads no weights, so it can be made for files whose weights would not fit."""
    plan = plan_model(directory, make_policy(BF16))
    assert not any(plan.problems.values())
    assert sum(leaf.size for leaf in plan.leaves.values()) == sum(
        value.size for value in TensorFiles.of(directory).values()
    )


@pytest.mark.parametrize("layout", ["unrolled", "stacked"])
def test_progress_ends_at_all_bytes(directory: Path, layout):
    seen = []
    model = load_model(
        directory,
        make_policy(BF16, depth=layout),
        show=lambda done, total: seen.append((done, total)),
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {size}
    assert seen[-1][0] == size


@pytest.mark.parametrize("depth", ["unrolled", "stacked"])
def test_a_mesh_splits_the_same_parameters(directory: Path, depth):
    policy = make_policy(BF16, depth=depth)
    mesh = make_mesh({"expert": 4, "tensor": 2})
    whole, split = load_model(directory, policy), load_model(directory, policy, mesh=mesh)
    assert equal(whole.params, split.params)
    leaves = jax.tree_util.tree_leaves_with_path(split.params)
    experts = [leaf for path, leaf in leaves if path[-1].key == "down_EFD"]
    assert experts
    axis = 0 if depth == "unrolled" else 1
    for leaf in experts:
        shard = leaf.addressable_shards[0].data.shape
        assert (shard[axis], shard[axis + 1]) == (leaf.shape[axis] // 4, leaf.shape[axis + 1] // 2)


def test_devices_read_only_their_own_experts(directory: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[TensorName] = []
    whole = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda files, name: (read.append(name), whole(files, name))[1])
    load_model(directory, make_policy(BF16), mesh=make_mesh({"expert": 4}))
    counts = {name: read.count(name) for name in read if ".experts." in name.whole}
    assert counts
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_layers_of_multi_token_prediction_are_not_the_models_own(quantization: str):
    source = golden("glm4_moe")
    model = load(source)
    extra = [name for name in TensorFiles.of(source) if name.startswith(f"model.layers.{len(model.net.arch.layers)}.")]
    assert extra
    mtp, params = load_mtp(source, model.net, quantization=quantization)
    assert ("attention/qkv_DGQC" in dict(mtp.policy.storage.formats)) == (quantization == "fp8")
    fresh = jax.eval_shape(mtp.initial, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)


def test_missing_layers_of_multi_token_prediction(directory: Path):
    source = golden("glm4_moe")
    tensors = {name: np.asarray(value) for name, value in TensorFiles.of(source).items()}
    (directory / "config.json").write_text((source / "config.json").read_text())
    kept = {name: value for name, value in tensors.items() if "enorm" not in name}
    save_file(kept, directory / "model.safetensors")
    model = load(directory)
    with pytest.raises(CheckpointError, match=r"saved again.*enorm\.weight"):
        load_mtp(directory, model.net)
