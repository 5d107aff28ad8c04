"""Heads as other projects publish them, written here tensor by tensor."""

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jaxspec.checkpoint.files.pickled import pickled_tensors
from jaxspec.checkpoint.heads.directory import load_head, stored_policy
from jaxspec.checkpoint.heads.identify import is_head
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import MedusaSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.protocol import CaptureSpec
from tests.unit.checkpoint.head_cases import (
    BFLOAT16,
    EAGLE3,
    EAGLE3_CONFIG,
    FIRST,
    FLOAT32,
    IDS_W,
    LATENT,
    LAYERS,
    TARGET,
    VOCABULARY,
    D,
    V,
    W,
    eagle3_files,
    layer_shapes,
    tensors_of,
    write_head,
)  # fmt: skip

SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": W,
    "norm_before_residual": True, "norm_before_fc": False, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "transformer_layer_config": LAYERS, "speculators_config": {},
}  # fmt: skip


def load(directory: Path) -> tuple[Head, HeadSpec]:
    found = load_head(directory, TARGET, FLOAT32)
    assert isinstance(found.net, DraftHead)
    return found, found.net.spec


def leaf(found: Head, *path: str) -> np.ndarray:
    node: Any = found.params["params"]
    for part in path:
        node = node[part]
    return np.asarray(node)


def test_eagle3_of_safeailab(tmp_path: Path):
    config = {k: v for k, v in EAGLE3_CONFIG.items() if not k.startswith("eagle")}
    files = eagle3_files()
    found, spec = load(write_head(tmp_path / "head", config, files))
    assert spec.reads == CaptureSpec(taps=(2, 4, 5))  # (2, L // 2, L - 3)
    assert (spec.join, spec.draft_vocab, spec.own_embedding, spec.mask_token) == ("attention", W, False, None)
    assert not any((spec.norm_before_residual, spec.norm_before_fc, spec.fc_norm, spec.norm_output))
    np.testing.assert_array_equal(found.ids_W, IDS_W)
    np.testing.assert_array_equal(leaf(found, "fc_XD"), files["fc.weight"].T)
    np.testing.assert_array_equal(leaf(found, "first", "feature_norm_D"), files["midlayer.hidden_norm.weight"])
    np.testing.assert_array_equal(leaf(found, "first", "embed_norm_D"), files["midlayer.input_layernorm.weight"])
    np.testing.assert_array_equal(leaf(found, "head_DW"), files["lm_head.weight"].T)
    gate_up = leaf(found, "first", "ffn", "gate_up_D2F")
    np.testing.assert_array_equal(gate_up[:, 1], files["midlayer.mlp.up_proj.weight"].T)
    # Two heads share a key-value head: queries 0 and 1, then key and value.
    qkv = leaf(found, "first", "attention", "qkv_DGQC")
    assert qkv.shape == (2 * D, 2, 4, 8)
    np.testing.assert_array_equal(qkv[:, 1, 1], files["midlayer.self_attn.q_proj.weight"][24:32].T)
    np.testing.assert_array_equal(qkv[:, 1, 2], files["midlayer.self_attn.k_proj.weight"][8:16].T)


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "model.midlayer."])
def test_one_layer_has_several_names(tmp_path: Path, prefix: str):
    given = {name.replace("midlayer.", prefix): x for name, x in eagle3_files().items()}
    config = EAGLE3_CONFIG | {"eagle_aux_hidden_state_layer_ids": None}  # block outputs alone, as ModelOpt writes
    found, spec = load(write_head(tmp_path / "head", config, given))
    assert spec.reads.taps == (2, 4, 5)
    norm = given[f"{prefix}hidden_norm.weight"]
    np.testing.assert_array_equal(leaf(found, "first", "feature_norm_D"), norm)


def test_later_layers_may_have_sglangs_name_of_their_norm(tmp_path: Path):
    shapes = EAGLE3 | layer_shapes("layers.0.", 2 * D, FIRST) | layer_shapes("layers.1.", D, ("hidden_norm",))
    files = tensors_of(shapes) | VOCABULARY
    config = EAGLE3_CONFIG | {"num_hidden_layers": 2}
    found, _ = load(write_head(tmp_path / "one", config, files))
    norm = files["layers.1.hidden_norm.weight"]
    np.testing.assert_array_equal(leaf(found, "layers_0", "attention_norm_D"), norm)
    both = files | {"layers.1.input_layernorm.weight": norm + 1}
    with pytest.raises(CheckpointError, match=r"layers.1.hidden_norm.weight .* differ, but are one parameter"):
        load(write_head(tmp_path / "two", config, both))


def test_norms_in_front_of_the_product_under_either_name(tmp_path: Path):
    legacy = tensors_of({f"aux_norm_{part}.weight": (D,) for part in ("low", "mid", "high")})
    found, spec = load(write_head(tmp_path / "parts", EAGLE3_CONFIG, eagle3_files() | legacy))
    assert (spec.fc_norm, spec.norm_before_fc) == (True, False)
    np.testing.assert_array_equal(leaf(found, "part_norm_XD"), np.stack(list(legacy.values())))
    one = tensors_of({"input_norm.weight": (3 * D,)})
    config = EAGLE3_CONFIG | {"norm_before_fc": True, "norm_output": True}
    found, spec = load(write_head(tmp_path / "all", config, eagle3_files() | one))
    assert (spec.fc_norm, spec.norm_before_fc, spec.norm_output) == (False, True, True)
    np.testing.assert_array_equal(leaf(found, "input_norm_X"), one["input_norm.weight"])


def test_ids_of_gpt_oss_heads_may_be_boundaries_inside_too(tmp_path: Path):
    ids = {"eagle_aux_hidden_state_layer_ids": [4, 6, 8]}
    config = EAGLE3_CONFIG | {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": ids}
    assert load(write_head(tmp_path / "head", config, eagle3_files()))[1].reads.taps == (4, 6, 8)


def test_a_head_without_taps_reads_the_last_hidden_state(tmp_path: Path):
    config = EAGLE3_CONFIG | {"eagle_config": {"use_aux_hidden_state": False}}
    files = eagle3_files() | {"fc.weight": np.zeros((D, D), np.float32)}  # published, and read by nobody
    _, spec = load(write_head(tmp_path / "head", config, files))
    assert (spec.last, spec.reads.taps, spec.feature_dim) == (True, (), D)


def test_eagle3_with_latent_attention(tmp_path: Path):
    shapes = EAGLE3 | layer_shapes("layers.0.", 2 * D, FIRST, latent=True)
    config = EAGLE3_CONFIG | LATENT | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
    files = tensors_of(shapes, BFLOAT16) | VOCABULARY
    found, spec = load(write_head(tmp_path / "head", config | {"n_routed_experts": 8}, files))
    assert isinstance(spec.arch.layers[0].attention, LatentSpec)
    low = files["layers.0.self_attn.kv_a_proj_with_mqa.weight"].astype(np.float32)
    np.testing.assert_array_equal(leaf(found, "first", "attention", "kv_a_DX"), low.T)
    assert stored_policy(tmp_path / "head").storage.param == BFLOAT16


def test_speculators_and_its_parallel_heads(tmp_path: Path):
    layers = {"transformer_layer_config": LAYERS | {"model_type": "qwen3"}}
    qwen3 = eagle3_files("layers.0.") | tensors_of({f"layers.0.self_attn.{n}_norm.weight": (8,) for n in "qk"})
    embedding = tensors_of({"embed_tokens.weight": (V, D)})
    _, spec = load(write_head(tmp_path / "eagle3", SPECULATORS | layers, qwen3 | embedding))
    assert (spec.norm_before_residual, spec.own_embedding, spec.reads.taps) == (True, True, (2, 4, 5))
    parallel = SPECULATORS | {"speculators_model_type": "peagle", "mask_token_id": 9}
    mask = tensors_of({"mask_hidden": (1, 1, 3 * D)})
    found, spec = load(write_head(tmp_path / "peagle", parallel, eagle3_files("layers.0.") | mask))
    assert spec.mask_token == 9
    np.testing.assert_array_equal(leaf(found, "mask_X"), mask["mask_hidden"][0, 0])
    with pytest.raises(CheckpointError, match="1 missing: mask_hidden"):
        load(write_head(tmp_path / "lost", parallel, eagle3_files("layers.0.")))


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_parallel_heads_of_specforge_and_aws(tmp_path: Path, key: str):
    shapes = EAGLE3 | layer_shapes("layers.0.", 2 * D, FIRST) | layer_shapes("layers.1.", D, ("input_layernorm",))
    files = tensors_of(shapes | {"mask_hidden": (1, 1, 3 * D)}) | VOCABULARY
    config = EAGLE3_CONFIG | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2}
    assert load(write_head(tmp_path / "head", config | {key: 5}, files))[1].mask_token == 5
    with pytest.raises(ConfigError, match="names no mask token; write mask_token_id"):
        load(write_head(tmp_path / "lost", config, files))


EAGLE1 = {"fc.weight": (D, 2 * D)} | layer_shapes("layers.0.", D, ())


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_of_safeailab(tmp_path: Path, bias: bool):
    files = tensors_of(EAGLE1 | ({"fc.bias": (D,)} if bias else {}) | {"embed_tokens.weight": (V, D)}, np.float16)
    config = LAYERS | {"architectures": ["LlamaForCausalLM"]} | ({} if bias else {"bias": False})
    found, spec = load(write_head(tmp_path / "head", config, files))
    assert (spec.join, spec.last, spec.join_bias, spec.draft_vocab) == ("product", True, bias, 0)
    np.testing.assert_array_equal(leaf(found, "first", "join_XD"), files["fc.weight"].T.astype(np.float32))
    assert found.ids_W is None
    assert found.params["params"]["first"].keys() >= {"attention", "ffn", "ffn_norm_D"}


def test_a_bias_that_is_promised_must_be_there(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"1 missing: fc.bias"):
        load(write_head(tmp_path / "head", LAYERS | {"bias": True}, tensors_of(EAGLE1)))


MEDUSA = {f"{m}.0.linear.weight": (D, D) for m in range(3)} | {f"{m}.0.linear.bias": (D,) for m in range(3)}
MEDUSA |= {f"{m}.1.weight": (V, D) for m in range(3)}


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_medusa(tmp_path: Path, prefix: str):
    files = tensors_of(MEDUSA)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    found = load_head(write_head(tmp_path / "head", config, {prefix + n: x for n, x in files.items()}), TARGET, FLOAT32)
    assert found.net.spec == MedusaSpec(3, 1, D, V, V)
    np.testing.assert_array_equal(leaf(found, "medusa_2", "residual_0_DX"), files["2.0.linear.weight"].T)
    np.testing.assert_array_equal(leaf(found, "medusa_1", "head_DW"), files["1.1.weight"].T)


class _Stub:
    """Pickles as a global of a module that need not be there."""

    def __init__(self, module: str, name: str):
        self.path = module, name

    def __call__(self, *_: Any) -> None:
        raise AssertionError("only its name is pickled")


class _Tensor:
    def __init__(self, *rebuild: Any):
        self.rebuild = rebuild

    def __reduce__(self) -> Any:
        return _Stub("torch._utils", "_rebuild_tensor_v2"), self.rebuild


class _Pickler(cast(Any, pickle)._Pickler):  # the one in Python, which can be told how a class is written
    def persistent_id(self, obj: Any) -> Any:
        return obj if isinstance(obj, tuple) and obj and obj[0] == "storage" else None

    def save_stub(self, obj: _Stub) -> None:
        self.write(pickle.GLOBAL + f"{obj.path[0]}\n{obj.path[1]}\n".encode())

    dispatch = cast(Any, pickle)._Pickler.dispatch | {_Stub: save_stub}


STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage", "bool": "BoolStorage"}


def write_archive(file: Path, tensors: dict[str, np.ndarray], stride: int = 1, **notes: Any) -> None:
    """What ``torch.save`` writes for a dictionary of tensors, and notes beside them."""
    state: OrderedDict[str, Any] = OrderedDict(notes)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for n, (name, x) in enumerate(tensors.items()):
            storage = ("storage", _Stub("torch", STORAGES[x.dtype.name]), str(n), "cpu", x.size)
            strides = tuple(stride * s // x.itemsize for s in x.strides)
            state[name] = _Tensor(storage, 0, x.shape, strides, False, OrderedDict())
            archive.writestr(f"archive/data/{n}", x.tobytes())
        out = io.BytesIO()
        _Pickler(out, 2).dump(state)
        archive.writestr("archive/data.pkl", out.getvalue())
        archive.writestr("archive/byteorder", "little")


def test_pytorch_archives_are_read_without_pytorch(tmp_path: Path):
    files = {name: x.astype(BFLOAT16) if x.dtype == np.float32 else x for name, x in eagle3_files().items()}
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(EAGLE3_CONFIG))
    write_archive(directory / "pytorch_model.bin", files)
    found, _ = load(directory)
    np.testing.assert_array_equal(leaf(found, "fc_XD"), files["fc.weight"].T.astype(np.float32))
    np.testing.assert_array_equal(found.ids_W, IDS_W)


def test_archives_that_hold_more_than_tensors_are_refused_with_the_way_out(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("run",)

    file = tmp_path / "model.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"x": Evil()}))
    with pytest.raises(CheckpointError, match=r"names builtins.print.*weights_only=True"):
        pickled_tensors(file)
    write_archive(file, {"x": np.ones((2, 2), np.float32)}, stride=2)
    with pytest.raises(CheckpointError, match="x is a turned or strided view"):
        pickled_tensors(file)
    file.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match="not a readable PyTorch archive"):
        pickled_tensors(file)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": V + 1}, f"a vocabulary of {V + 1}, the target's is {V}"),
    "hidden": ({"target_hidden_size": 64}, "reads vectors of 64, the target's hidden size is 32"),
    "narrow": ({"hidden_size": 16, "target_hidden_size": D}, "target's embedding and head of 32 do not fit"),
    "deep": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9], "eagle_config": {}}, "boundaries go from 0 to 8"),
    "order": ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5], "eagle_config": {}}, "do not ascend"),
    "contradiction": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "vLLM reads as layer boundaries"),
    "words": ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, "list of whole numbers"),
    "dflash": ({"architectures": ["DFlashDraftModel"]}, "drafts blocks"),
    "mtp": ({"speculators_model_type": "mtp"}, "'mtp' is not supported"),
    "missing": ({"rope_theta": 1e4, "intermediate_size": None}, "missing .'intermediate_size'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_head_that_does_not_fit_is_an_error(tmp_path: Path, case: str):
    changes, message = BAD[case]
    directory = write_head(tmp_path / "head", EAGLE3_CONFIG | changes, eagle3_files())
    with pytest.raises(ConfigError, match=message.replace("boundaries go", "the target's go")):
        load(directory)


def _shuffled() -> np.ndarray:
    return (IDS_W[::-1] - np.arange(W)).astype(np.int64)


VOCABULARIES: dict[str, tuple[dict[str, np.ndarray | None], str]] = {
    "none": ({"d2t": None, "t2d": None}, f"knows {W} of the target's {V} tokens, but its files have no d2t"),
    "ids": ({"d2t": IDS_W.astype(np.int64)}, "holds ids of the target instead of offsets"),
    "bare-ids": ({"d2t": IDS_W.astype(np.int64), "t2d": None}, "holds ids of the target instead of offsets"),
    "beyond": ({"d2t": VOCABULARY["d2t"] + V, "t2d": None}, f"but the target has {V} tokens"),
    "order": ({"d2t": _shuffled(), "t2d": None}, "ids must ascend"),
    "mask": ({"t2d": np.zeros(V, bool)}, "d2t and t2d disagree"),
    "short": ({"d2t": VOCABULARY["d2t"][:-1]}, "the draft vocabulary has 20 tokens"),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_a_wrong_vocabulary_is_an_error(tmp_path: Path, case: str):
    changes, message = VOCABULARIES[case]
    files = {name: x for name, x in (eagle3_files() | changes).items() if x is not None}
    with pytest.raises(CheckpointError, match=message):
        load(write_head(tmp_path / "head", EAGLE3_CONFIG, files))


def test_a_speculators_config_must_state_which_residual_it_means(tmp_path: Path):
    config = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
    with pytest.raises(ConfigError, match="vLLM takes for true"):
        load(write_head(tmp_path / "head", config, eagle3_files("layers.0.")))


def test_a_native_config_states_everything(tmp_path: Path):
    config = {"architectures": ["JaxspecDraftHead"], "head": {"last": True}, "transformer_layer_config": LAYERS}
    with pytest.raises(ConfigError, match=r"missing or not known are \['draft_vocab'"):
        load(write_head(tmp_path / "head", config, eagle3_files()))


def test_models_are_not_taken_for_heads(tmp_path: Path):
    assert is_head(EAGLE3_CONFIG)
    assert is_head(SPECULATORS)
    assert not is_head({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"})
    with pytest.raises(ConfigError, match="nor the tensors are those of a draft head"):
        load(write_head(tmp_path / "head", {"model_type": "llama"}, tensors_of({"model.norm.weight": (D,)})))
