import json
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from jaxspec import LLM, SamplingParams
from jaxspec.checkpoint.files.fingerprint import fingerprint
from jaxspec.checkpoint.files.stream import TensorFiles
from jaxspec.checkpoint.gguf import blocks, convert
from jaxspec.checkpoint.gguf.convert import convert_gguf
from jaxspec.checkpoint.gguf.gguf_header import read_gguf
from jaxspec.checkpoint.gguf.gguf_tensors import open_tensors
from jaxspec.checkpoint.hub import resolve_model
from jaxspec.checkpoint.load.fill import fill
from jaxspec.checkpoint.load.model import load_mtp, plan_model, read_config, read_generation
from jaxspec.checkpoint.load.save import save_model
from jaxspec.cli.main import main
from jaxspec.errors import CheckpointError, ConfigError, JaxspecError
from jaxspec.inspect.model_report import report_model
from jaxspec.models.catalog import arch_of
from jaxspec.nn.policy import make_policy
from pallas_kernels.quantized import Quantized, widen
from tests.unit.checkpoint.gguf_files import metadata_of, put, write_gguf

GOLDEN = Path(__file__).parents[2] / "golden"
POLICY = make_policy(np.dtype(np.float32), depth="stacked")
# What GGUF cannot say is taken out of the tiny models: windows of some layers only, another limit than gpt-oss's, and
# DeepSeek's multi-token prediction.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},
    "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v3": {"num_nextn_predict_layers": 0},
}


def copy_of(name: str, place: Path) -> Path:
    shutil.copytree(GOLDEN / name, place / name)
    file = place / name / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CHANGES.get(name, {})))
    return place / name


def assert_same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "llama_tied",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
        "glm4_moe",
    ],
)
def test_a_gguf_file_is_the_model_that_it_was_made_of(name: str, tmp_path: Path):
    directory = copy_of(name, tmp_path)
    file = write_gguf(directory, tmp_path / "m.gguf")
    ours, theirs = plan_model(file, POLICY), plan_model(directory, POLICY)
    ours.check()
    assert ours.net == theirs.net
    assert_same(fill(ours), fill(theirs))


def test_the_one_matrix_of_older_deepseek_files(tmp_path: Path):
    directory = copy_of("deepseek_v3", tmp_path)
    file = write_gguf(directory, tmp_path / "m.gguf", cut_latent=False)
    assert_same(fill(plan_model(file, POLICY)), fill(plan_model(directory, POLICY)))


def test_the_single_experts_of_older_mixtral_files(tmp_path: Path):
    file = write_gguf(GOLDEN / "mixtral", tmp_path / "m.gguf", stacked=False)
    assert "blk.0.ffn_gate.7.weight" in read_gguf(file).tensors
    assert_same(fill(plan_model(file, POLICY)), fill(plan_model(GOLDEN / "mixtral", POLICY)))


def test_multi_token_prediction(tmp_path: Path):
    directory = copy_of("glm4_moe", tmp_path)
    file = write_gguf(directory, tmp_path / "m.gguf")
    (net, ours), (other, theirs) = (load_mtp(path, plan_model(path, POLICY).net) for path in (file, directory))
    assert net == other
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "MXFP4"])
def test_types_are_widened_as_the_library_does(kind: str, tmp_path: Path):
    file = write_gguf(GOLDEN / "llama3", tmp_path / "m.gguf", kind=kind)
    files, reader = open_tensors(file), gguf.GGUFReader(file)
    stored = {t.name: t for t in reader.tensors}
    down, gate = stored["blk.1.ffn_down.weight"], stored["blk.1.ffn_gate.weight"]
    assert gate.tensor_type.name == kind
    plan = plan_model(file, POLICY, "none")
    plan.check()
    params = fill(plan)["params"]["segment_0"]["ffn"]
    np.testing.assert_array_equal(params["gate_up_D2F"][1][:, 0], dequantize(gate.data, gate.tensor_type).T)
    np.testing.assert_array_equal(params["down_FD"][1], dequantize(down.data, down.tensor_type).T)
    embedding = stored["token_embd.weight"]
    wanted = dequantize(embedding.data, embedding.tensor_type).reshape(96, 32)
    np.testing.assert_array_equal(np.asarray(files["model.embed_tokens.weight"], np.float32), wanted)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "TQ2_0"])
def test_types_that_the_library_only_reads(kind: str, tmp_path: Path):
    type_, rng = GGMLQuantizationType[kind], np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[type_]
    # Bytes below 0x7C make no scale that is infinite.
    rows = {"blk.0.ffn_down.weight": (6,), "blk.1.ffn_down_exps.weight": (3, 6)}
    raw = {name: rng.integers(0, 0x7C, (*lead, 512 // block * size), np.uint8) for name, lead in rows.items()}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    put(writer, "qwen3moe.attention.head_count", 4)
    for name, data in raw.items():
        writer.add_tensor(name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = open_tensors(tmp_path / "m.gguf")
    wanted = {name: dequantize(data, type_) for name, data in raw.items()}
    np.testing.assert_array_equal(files["model.layers.0.mlp.down_proj.weight"], wanted["blk.0.ffn_down.weight"])
    for e in range(3):
        ours = files[f"model.layers.1.mlp.experts.{e}.down_proj.weight"]
        np.testing.assert_array_equal(ours, wanted["blk.1.ffn_down_exps.weight"][e])


@pytest.mark.parametrize(("kind", "stays"), [("Q8_0", "int8"), ("Q4_0", "int8"), ("Q5_0", "int8"), ("MXFP4", "fp4")])
@pytest.mark.parametrize("name", ["llama3", "qwen3_moe"])
def test_matrices_stay_quantized_without_loss(name: str, kind: str, stays: str, tmp_path: Path):
    file = write_gguf(GOLDEN / name, tmp_path / "m.gguf", kind=kind)
    exact = fill(plan_model(file, POLICY, "none"))
    plan = plan_model(file, POLICY)
    plan.check()
    kept = {kind: form.kind for kind, form in plan.kinds().items() if form is not None}
    assert kept["attention/qkv_DGQC"] == stays
    assert not {"embed_VD", "head_DV", "ffn/router_DE"} & set(kept)
    widened = jax.tree.map(
        lambda w: np.asarray(widen(w, np.float32)), fill(plan), is_leaf=lambda w: isinstance(w, Quantized)
    )
    assert_same(widened, exact)


@pytest.mark.parametrize("kind", ["F32", "MXFP4"])
def test_stacked_experts_of_gpt_oss(kind: str, tmp_path: Path):
    directory = copy_of("gpt_oss_mxfp4", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    plain = fill(plan_model(directory, POLICY, "none"))
    config.pop("quantization_config", None)
    config["swiglu_limit"] = 7.0
    save_model(tmp_path / "plain", plain, arch_of(config), config, np.dtype(np.float32))
    file = write_gguf(tmp_path / "plain", tmp_path / "m.gguf", kind=lambda n: kind if "_exps.weight" in n else "F32")
    plan = plan_model(file, POLICY)
    plan.check()
    assert ("ffn/gate_up_ED2F" in {k for k, f in plan.kinds().items() if f}) == (kind == "MXFP4")
    # Numbers that are MXFP4 already stay what they are.
    assert_same(fill(plan_model(file, POLICY, "none")), plain)


@pytest.mark.parametrize(
    ("name", "kind"), [("mixtral", "Q8_0"), ("deepseek_v3", "F32"), ("glm4_moe", "Q4_0"), ("gpt_oss", "F32")]
)
def test_conversion_changes_no_number(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert, "SHARD_BYTES", 30_000)
    directory = copy_of(name, tmp_path)
    file = write_gguf(directory, tmp_path / "m.gguf", kind=kind)
    convert_gguf(file, tmp_path / "out", "float32")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    ours, theirs = plan_model(tmp_path / "out", POLICY), plan_model(file, POLICY, "none")
    ours.check()
    assert ours.net == theirs.net
    assert_same(fill(ours), fill(theirs))


def test_converted_mxfp4_experts_stay_as_published(tmp_path: Path):
    directory = copy_of("gpt_oss_mxfp4", tmp_path)
    plain, config = fill(plan_model(directory, POLICY, "none")), read_config(directory)
    config = {key: value for key, value in config.items() if key != "quantization_config"} | {"swiglu_limit": 7.0}
    save_model(tmp_path / "plain", plain, arch_of(config), config, np.dtype(np.float32))
    file = write_gguf(tmp_path / "plain", tmp_path / "m.gguf", kind=lambda n: "MXFP4" if "_exps.weight" in n else "F32")
    convert_gguf(file, tmp_path / "out", "float32")
    there, was = TensorFiles.of(tmp_path / "out"), TensorFiles.of(directory)
    assert read_config(tmp_path / "out")["quantization_config"]["quant_method"] == "mxfp4"
    assert {n: t.shape for n, t in there.tensors.items()} == {n: t.shape for n, t in was.tensors.items()}
    assert_same(fill(plan_model(tmp_path / "out", POLICY)), fill(plan_model(file, POLICY)))


def test_int8_types_are_exact():
    rng = np.random.default_rng(0)
    for name in blocks.INT8:
        kind = GGMLQuantizationType[name]
        raw = quantize(rng.normal(size=(6, 96)).astype(np.float32), kind)
        widened = blocks.int8_numbers(raw, name) * np.repeat(blocks.int8_scales(raw, name), 32, axis=1)
        np.testing.assert_array_equal(widened, dequantize(raw, kind))


def test_llamas_table_of_rotary_factors_that_is_not_known(tmp_path: Path):
    file = write_gguf(GOLDEN / "llama3", tmp_path / "m.gguf")
    tensor = read_gguf(file).tensors["rope_freqs.weight"]
    data = bytearray(file.read_bytes())
    data[tensor.begin : tensor.begin + 4] = struct.pack("<f", 3.0)
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="rotary factors"):
        read_config(file)


def test_an_architecture_that_is_not_known(tmp_path: Path):
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="architecture 'mamba' is not supported; known are deepseek2, glm4moe"):
        read_config(file)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such directory; a model is .* a \.gguf file"):
        resolve_model("model.gguf")


def test_unknown_and_missing_tensors_are_named(tmp_path: Path):
    file = write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf")
    data = file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"missing: model.layers.1.mlp.up_proj.weight; .*blk.1.ffn_xx.weight"):
        plan_model(file, POLICY).check()


def test_hostile_files(tmp_path: Path):
    file = write_gguf(GOLDEN / "llama_tied", tmp_path / "m.gguf")
    data = file.read_bytes()
    dims = data.index(b"token_embd.weight") + 17  # where what the header says of a tensor goes on
    cases = {
        "is no GGUF": b"",
        "no GGUF file": b"XXXX" + data[4:],
        "GGUF version": data[:4] + struct.pack(">I", 3) + data[8:],
        "tensors, at most": data[:8] + struct.pack("<Q", 1 << 60) + data[16:],
        "keys, at most": data[:16] + struct.pack("<Q", 1 << 60) + data[24:],
        "truncated": data[: len(data) // 2],
        "bytes are needed at byte": data[:24] + struct.pack("<Q", 1 << 62) + data[32:],
        "dimensions": data[:dims] + struct.pack("<I", 1 << 30) + data[dims + 4 :],
        "ends at byte": data[: dims + 4] + struct.pack("<Q", 1 << 40) + data[dims + 12 :],
        "does not know": data[: dims + 20] + struct.pack("<I", 4711) + data[dims + 24 :],
        "is not made of blocks": data[: dims + 24] + struct.pack("<Q", 1) + data[dims + 32 :],
        "overlaps another": data[: dims + 24] + struct.pack("<Q", 32) + data[dims + 32 :],
        "is there twice": data.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"),
        "unknown kind": data.replace(b"rope.freq_base\x06", b"rope.freq_base\x63"),
    }
    for n, (words, damaged) in enumerate(cases.items()):
        broken = tmp_path / f"{n}.gguf"
        broken.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=words):
            read_gguf(broken)
    link = tmp_path / "directory.gguf"
    link.mkdir()
    with pytest.raises(JaxspecError):
        read_gguf(link)


def test_no_truncation_and_no_flipped_byte_of_a_header_escapes_the_checks(tmp_path: Path):
    file = write_gguf(GOLDEN / "llama_tied", tmp_path / "m.gguf")
    data, broken = file.read_bytes(), tmp_path / "b.gguf"
    start, rng = min(t.begin for t in read_gguf(file).tensors.values()), np.random.default_rng(1)
    for n in range(150):
        changed = bytearray(data)
        at = int(rng.integers(start))
        changed[at] ^= int(rng.integers(1, 256))
        broken.write_bytes(changed if n % 3 else data[: int(rng.integers(len(data)))])
        try:
            plan_model(broken, POLICY).check()
        except JaxspecError:
            continue


def test_a_model_split_into_files(tmp_path: Path):
    whole = write_gguf(GOLDEN / "qwen3", tmp_path / "whole.gguf")
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    tensors = list(gguf.GGUFReader(whole).tensors)
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    for n, (file, part) in enumerate(((first, tensors[:5]), (second, tensors[5:]))):
        writer = gguf.GGUFWriter(file, "qwen3")
        for key, value in metadata_of(config, "qwen3").items() if n == 0 else ():
            put(writer, f"qwen3.{key}", value)
        writer.add_uint16("split.no", n)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in part:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert_same(fill(plan_model(first, POLICY)), fill(plan_model(whole, POLICY)))
    with pytest.raises(CheckpointError, match=r"give the first, m-00001-of-00002\.gguf"):
        read_gguf(second)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf"):
        read_gguf(first)


def test_what_inspection_says(tmp_path: Path):
    text = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.bos_token_id": 0}
    file = write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf", kind="Q8_0", text=text)
    report = report_model(file)
    assert report["quantization"]["config"].startswith("GGUF: ")
    assert "Q8_0" in report["quantization"]["config"]
    assert report["text"]["eos_token_ids"] == [1, 7]
    assert read_generation(file) == {"bos_token_id": 0, "eos_token_id": [1, 7]}
    assert report["tensors"]["missing"] == report["tensors"]["extra"] == []
    assert report["refused"] == {}


def test_a_directory_that_holds_only_a_gguf_file_says_what_to_give(tmp_path: Path):
    write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf")
    shutil.copy(GOLDEN / "qwen3" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"it holds m\.gguf: give that file itself as the model"):
        TensorFiles.of(tmp_path)


def test_it_serves_and_drafts(tmp_path: Path):
    directory = copy_of("qwen3", tmp_path)
    file = write_gguf(directory, tmp_path / "m.gguf")
    settings: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 1, "max_model_len": 64, "prefill_buckets": (32,)}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    speculative = {"method": "draft_model", "model": str(file), "num_speculative_tokens": 2}
    texts = []
    for model, config in ((directory, None), (file, speculative)):
        (output,) = LLM(model, speculative_config=config, **settings).generate({"prompt_token_ids": [5, 6, 7]}, params)
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
    assert output.metrics.mean_acceptance_length > 2.5  # it drafts for itself
    assert fingerprint(file) != fingerprint(write_gguf(GOLDEN / "qwen3", tmp_path / "other.gguf", kind="F16"))


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf", kind="Q8_0")
    assert main(["inspect", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "GGUF: " in shown
    assert "attention/qkv_DGQC int8" in shown
    assert main(["convert", str(file), str(tmp_path / "out")]) == 0
    assert "of weights in bfloat16, ready" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert main(["convert", str(GOLDEN / "qwen3"), str(tmp_path / "two")]) == 2
    assert "is no .gguf file" in capsys.readouterr().err
