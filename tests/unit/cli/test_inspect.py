"""``jaxspec inspect``: directories whole and broken, bare configs, mistakes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.cli.main import main
from jaxspec.cli.screen import amount
from scripts.house_report import ROOT
from tests.unit.serve.tiny_model import write_tiny_model

CONFIG = ROOT / "configs" / "models" / "gpt-oss-20b.json"
PREDICTING = ROOT / "tests" / "golden" / "glm4_moe"
QUANTIZED = ROOT / "tests" / "golden" / "deepseek_v3_fp8"
EXPERT = "model.layers.0.mlp.experts.{}.down_proj.weight"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def inspect(capsys: pytest.CaptureFixture, path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["inspect", str(path), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def test_a_whole_directory_misses_nothing(tiny: Path, capsys: pytest.CaptureFixture):
    code, found = inspect(capsys, tiny)
    assert code == 0
    tensors = load_file(tiny / "model.safetensors")
    assert found["tensors"] == {
        "in_files": len(tensors), "read": len(tensors), "missing": [], "extra": [], "misshaped": [], "mistyped": [],
    }  # fmt: skip
    assert found["parameters"]["total"] == sum(x.size for x in tensors.values())
    assert found["bytes"]["on_disk"]["total"] == sum(x.nbytes for x in tensors.values())
    assert found["bytes"]["in_memory"]["total"] == 2 * found["parameters"]["total"]
    assert found["text"] == {"eos_token_ids": [0], "tokenizer": "tokenizer.json", "chat_template": True}
    assert found["drafters"]["ngram"] == "chains and trees"
    assert found["prefix_cache"] == {"target": "in blocks of 32 tokens: prompts and answers"}


@pytest.mark.parametrize("other", [None, "pytorch_model.bin"])
def test_a_directory_without_weights_says_so(tiny: Path, other: str | None, capsys: pytest.CaptureFixture):
    (tiny / "model.safetensors").unlink()
    if other:
        (tiny / other).write_bytes(b"archive")
    code, found = inspect(capsys, tiny)
    assert code == 1
    assert (found["tensors"]["in_files"], found["tensors"]["read"]) == (0, 0)
    assert "no .safetensors file" in found["refused"]["weights"]
    assert (other or "download the weights") in found["refused"]["weights"]
    assert main(["inspect", str(tiny)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "tensors 0 in the files, 0 of them read" in shown
    assert "no .safetensors file" in shown


@pytest.mark.parametrize(
    ("file", "content", "what", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer", "the tokenizer cannot be read"),
        ("generation_config.json", '{"temperature": -1}', "generation_config", "temperature"),
        ("generation_config.json", '{"top_p": 2}', "generation_config", "top_p"),
    ],
)
def test_what_else_would_be_refused(
    file: str, content: str, what: str, words: str, tiny: Path, capsys: pytest.CaptureFixture
):
    (tiny / file).write_text(content)
    code, found = inspect(capsys, tiny)
    assert code == 1
    assert list(found["refused"]) == [what]
    assert words in found["refused"][what]


def test_keys_that_nothing_reads_are_listed(tiny: Path, capsys: pytest.CaptureFixture):
    assert inspect(capsys, tiny)[1]["ignored_keys"] == []
    file = tiny / "config.json"
    config = json.loads(file.read_text()) | {"my_note": "hi", "mystery_scale": 3.0}
    file.write_text(json.dumps(config))
    code, found = inspect(capsys, tiny)
    assert (code, found["ignored_keys"]) == (0, ["my_note", "mystery_scale"])
    assert main(["inspect", str(tiny)]) == 0
    assert "ignored keys  my_note, mystery_scale" in capsys.readouterr().out
    file.write_text(json.dumps(config | {"attn_logit_softcapping": 30.0}))
    assert main(["inspect", str(tiny)]) == 2
    assert "does not have attn_logit_softcapping = 30.0 in jaxspec" in capsys.readouterr().err


def test_everything_wrong_is_listed_by_pattern(tiny: Path, capsys: pytest.CaptureFixture):
    tensors = load_file(tiny / "model.safetensors")
    count = json.loads((tiny / "config.json").read_text())["num_experts"]
    for e in range(count):
        del tensors[EXPERT.format(e)]
    tensors["model.layers.0.mystery.weight"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, tiny / "model.safetensors")
    code, found = inspect(capsys, tiny)
    assert code == 1
    assert found["tensors"]["missing"] == [EXPERT.format(f"{{0..{count - 1}}}")]
    assert found["tensors"]["extra"] == ["model.layers.0.mystery.weight"]
    assert "model.norm.weight" in found["tensors"]["misshaped"][0]
    assert main(["inspect", str(tiny)]) == 1
    shown = capsys.readouterr().out
    assert f"missing: {EXPERT.format(f'{{0..{count - 1}}}')}" in shown


def test_a_bare_config_promises_its_files(capsys: pytest.CaptureFixture):
    code, found = inspect(capsys, CONFIG)
    assert code == 0
    assert found["tensors"]["in_files"] == 459
    assert found["bytes"]["promised"] == found["bytes"]["promised"] | {"total": 13761264768, "not_read": 0}
    assert found["layers"] == {
        "grouped-query attention, window of 128, sinks; 4 of 32 experts of 2880": 12,
        "grouped-query attention, sinks; 4 of 32 experts of 2880": 12,
    }
    each = 2 * 8 * 64 * 2
    assert sum(found["cache"]["bytes_per_token"].values()) == 12 * each
    assert sum(found["cache"]["bytes_per_row"].values()) == 12 * each * 384, "window and forward in whole blocks"
    assert found["quantization"]["kept_in_memory"]["ffn/down_EFD"] == "fp4"
    assert found["text"]["eos_token_ids"] == [200002]
    main(["inspect", str(CONFIG)])
    shown = capsys.readouterr().out
    assert "20,914,757,184" in shown
    assert "13.8 GB" in shown
    _, wide = inspect(capsys, CONFIG, "--quantization", "none")
    assert wide["bytes"]["in_memory"]["total"] == 2 * wide["parameters"]["total"]


def test_quantised_weights_stay_so_in_memory(capsys: pytest.CaptureFixture):
    code, found = inspect(capsys, QUANTIZED)
    assert code == 0
    assert found["quantization"]["config"] == "fp8"
    assert "fp8" in found["quantization"]["kept_in_memory"].values()
    assert found["bytes"]["in_memory"]["total"] < 2 * found["parameters"]["total"]


def test_multi_token_prediction_is_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture):
    _, found = inspect(capsys, PREDICTING)
    assert found["multi_token_prediction"] == found["multi_token_prediction"] | {"layers": 1, "present": True}
    assert found["drafters"]["mtp"] == "chains and trees"
    saved = tmp_path / "saved"
    shutil.copytree(PREDICTING, saved)
    tensors = load_file(PREDICTING / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if ".layers.3." not in name}
    save_file(kept, saved / "model.safetensors")
    code, without = inspect(capsys, saved)
    assert code == 0, "the model itself is whole"
    assert without["multi_token_prediction"]["present"] is False
    assert "model.layers.3.mlp.experts.{0..3}.down_proj.weight" in without["multi_token_prediction"]["missing"]
    assert without["drafters"]["mtp"].startswith("no: ")


def test_trees_are_refused_where_attention_cannot_verify_them(capsys: pytest.CaptureFixture):
    _, found = inspect(capsys, ROOT / "tests" / "golden" / "deepseek_v4")
    assert found["drafters"]["ngram"].startswith("chains only: ")


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (None, [], "no such directory"),
        ("{", [], "not readable as JSON"),
        ("[1]", [], "a JSON object is needed, got list"),
        ('{"model_type": "rwkv"}', [], "model_type 'rwkv' is not known"),
        ('{"model_type": "llama"}', [], "missing ['hidden_size'"),
        (CONFIG.read_text(), ["--quantization", "int8"], "published as fp4"),
        (CONFIG.read_text(), ["--logit-error"], "--logit-error needs --quantization fp8 or int8"),
    ],
)
def test_mistakes_are_one_line(
    content: str | None, flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    assert main(["inspect", str(path), *flags]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert words in shown[0]


def test_amounts_are_short():
    assert [amount(n) for n in (0, 999, 1000, 35136, 688.6e9, 2.5e15)] == [
        "0 B", "999 B", "1 kB", "35.1 kB", "689 GB", "2.5e+03 TB",
    ]  # fmt: skip
