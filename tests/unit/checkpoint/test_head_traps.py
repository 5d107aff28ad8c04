"""The ten traps between engines, each seen at least once, in files that other tools could have written."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.heads.formats import Verifier
from jaxspec.checkpoint.heads.traps import Finding, check_head
from jaxspec.cli.main import main
from jaxspec.models.medusa import MedusaSpec
from jaxspec.protocol import CaptureSpec
from tests.unit.checkpoint.head_cases import (
    CONFIG,
    EAGLE3,
    EAGLE3_CONFIG,
    FIRST,
    LAYERS,
    ROUTED,
    VOCABULARY,
    D,
    V,
    W,
    eagle3_files,
    embedding,
    head,
    layer_shapes,
    spec,
    tensors_of,
    write_head,
    write_target,
)  # fmt: skip

TAPS = "eagle_aux_hidden_state_layer_ids"
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def findings(directory: Path, target: Path) -> tuple[dict[str, Finding], str]:
    found, refusal = check_head(directory, target)
    assert [finding.trap for finding in found] == [f"T{n}" for n in range(1, 11)]
    return {finding.trap: finding for finding in found}, refusal


def look(tmp_path: Path, target: Path, config: dict[str, Any], files: dict[str, np.ndarray] | None = None):
    given = {key: value for key, value in (EAGLE3_CONFIG | config).items() if value is not ...}
    return findings(write_head(tmp_path / "head", given, eagle3_files() if files is None else files), target)


@pytest.mark.parametrize("form", ["native", "eagle3", "speculators", "medusa"])
def test_what_jaxspec_writes_is_free_of_traps(tmp_path: Path, target: Path, form):
    made = head(MedusaSpec(2, 1, D, V, V) if form == "medusa" else spec({"num_hidden_layers": 2}))
    save_head(made, tmp_path / "head", form, verifier=Verifier(str(target)))
    found, refusal = findings(tmp_path / "head", target)
    assert refusal == ""
    assert {finding.verdict for finding in found.values()} == {"ok"}


def test_experts_are_counted(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]):
    save_head(head(spec(ROUTED | {"num_hidden_layers": 2})), tmp_path / "head")
    assert main(["inspect", str(tmp_path / "head"), "--target", str(target)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    counts = re.search(r"4 experts in 2 of 2 layers, 2 for a token: ([\d,]+) of ([\d,]+) parameters", said)
    assert counts, said
    active, every = (int(count.replace(",", "")) for count in counts.groups())
    assert every - active == 2 * 2 * 3 * D * 12
    assert main(["inspect", str(tmp_path / "head"), "--target", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"].startswith("4 experts in 2 of 2 layers")


def test_t1_ids_that_contradict_each_other_or_leave_the_target(tmp_path: Path, target: Path):
    found, refusal = look(tmp_path, target, {TAPS: [1, 3, 4]})
    assert found["T1"].verdict == "error"
    assert found["T1"].vllm == "taps boundaries [1, 3, 4]"
    assert found["T1"].sglang == "taps boundaries [2, 4, 5]"
    assert "vLLM reads as layer boundaries" in refusal
    shutil.rmtree(tmp_path / "head")
    found, refusal = look(tmp_path, target, {TAPS: [2, 4, 9], "eagle_config": {}})
    assert found["T1"].verdict == "error"
    assert "within 0 to 8" in found["T1"].found
    assert "the target's go from 0 to 8" in refusal


CASES: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "inside": ({TAPS: ..., "eagle_config": {TAPS: [1, 2, 4]}}, "[2, 4, 5]", None),
    "top": ({TAPS: [2, 3, 5], "eagle_config": ...}, None, "[2, 4, 5]"),
    "nowhere": ({TAPS: ..., "eagle_config": ...}, "[2, 4, 5]", "[2, 4, 5]"),
}


@pytest.mark.parametrize("case", CASES)
def test_t2_ids_that_an_engine_does_not_look_for(tmp_path: Path, target: Path, case: str):
    config, vllm, sglang = CASES[case]
    found, refusal = look(tmp_path, target, config)
    assert refusal == ""
    assert found["T2"].verdict == "warning"
    for guess, words in ((vllm, found["T2"].vllm), (sglang, found["T2"].sglang)):
        assert ("finds nothing" in words) == (guess is not None)
        assert guess is None or guess in words
    assert "jaxspec export" in found["T2"].cure


def test_t2_a_lacking_place_is_no_matter_where_the_default_is_right(tmp_path: Path, target: Path):
    found, _ = look(tmp_path, target, {TAPS: ...})
    assert found["T2"].verdict == "ok"


def test_t2_vllm_takes_three_taps_for_granted_in_speculators_files(tmp_path: Path, target: Path):
    made = head(spec(reads=CaptureSpec(taps=(2, 4))))
    save_head(made, tmp_path / "head", "speculators", verifier=Verifier(str(target)))
    found, refusal = findings(tmp_path / "head", target)
    assert refusal == ""
    assert (found["T2"].verdict, found["T2"].vllm) == ("warning", "fails")


def test_t3_sglang_reads_ids_of_some_targets_as_they_are(tmp_path: Path, target: Path):
    for family, nested, verdict, taps in (
        ("qwen3_moe", [2, 4, 5], "ok", None),
        ("glm4_moe_lite", [2, 4, 5], "warning", "taps [2, 4, 5]"),
        ("glm4_moe_lite", [1, 3, 4], "ok", None),
        ("gpt_oss", [4, 6, 8], "ok", None),
    ):
        with_family(target, family)
        config = {TAPS: ..., "eagle_config": {TAPS: nested}}
        found, refusal = look(tmp_path, target, config)
        assert refusal == ""
        assert found["T3"].verdict == verdict, family
        assert taps is None or found["T3"].sglang == taps
        shutil.rmtree(tmp_path / "head")


def with_family(target: Path, family: str) -> None:
    """Gives the target another family's config, as deep and as wide."""
    golden = Path(__file__).parents[2] / "golden" / family / "config.json"
    config = json.loads(golden.read_text())
    config |= {"num_hidden_layers": 8, "hidden_size": D, "vocab_size": V, "num_nextn_predict_layers": 0}
    for key in ("layer_types", "mlp_layer_types"):
        config.pop(key, None)
    (target / "config.json").write_text(json.dumps(config))


def test_t4_the_residual_that_sglang_does_not_norm(tmp_path: Path, target: Path):
    found, refusal = look(tmp_path, target, {"norm_before_residual": True})
    assert refusal == ""
    assert (found["T4"].verdict, found["T4"].sglang) == ("warning", "ignores it, adds to the bare")


def test_t4_the_residual_that_a_speculators_config_does_not_state(tmp_path: Path, target: Path):
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": LAYERS, "draft_vocab_size": W}
    directory = write_head(tmp_path / "head", config | {TAPS: [2, 4, 5]}, eagle3_files("layers.0."))
    found, refusal = findings(directory, target)
    assert (found["T4"].verdict, found["T4"].vllm) == ("error", "takes true")
    assert "does not state norm_before_residual" in refusal


@pytest.mark.parametrize("stated", [True, False])
def test_t5_the_output_norm_that_specforge_understands_otherwise(tmp_path: Path, target: Path, stated: bool):
    found, refusal = look(tmp_path, target, {"norm_output": stated})
    assert refusal == ""
    assert found["T5"].verdict == "warning"
    assert "SpecForge" in found["T5"].found
    assert "take norm_output out" in found["T5"].cure


@pytest.mark.parametrize("name", ["input_layernorm", "hidden_norm"])
def test_t6_the_norm_of_later_layers_under_one_engines_name(tmp_path: Path, target: Path, name: str):
    shapes = EAGLE3 | layer_shapes("layers.0.", 2 * D, FIRST) | layer_shapes("layers.1.", D, (name,))
    found, refusal = look(tmp_path, target, {"num_hidden_layers": 2}, tensors_of(shapes) | VOCABULARY)
    assert refusal == ""
    assert found["T6"].verdict == "warning"
    blind = found["T6"].sglang if name == "input_layernorm" else found["T6"].vllm
    assert "initial value" in blind


def test_t7_embeddings(tmp_path: Path, target: Path):
    for own, verdict, words in (
        (embedding(), "ok", "a copy of the target's"),
        (embedding() + 1, "warning", "its own, not the target's"),
        (np.zeros((V + 1, D), np.float32), "error", f"{V + 1} rows, but the target has {V} tokens"),
    ):
        found, refusal = look(tmp_path, target, {}, eagle3_files() | {"embed_tokens.weight": own})
        assert (found["T7"].verdict, found["T7"].found) == (verdict, words)
        assert bool(refusal) == (verdict == "error")
        shutil.rmtree(tmp_path / "head")


def test_t8_ids_in_place_of_offsets(tmp_path: Path, target: Path):
    ids_W = VOCABULARY["d2t"] + np.arange(W)
    found, refusal = look(tmp_path, target, {}, eagle3_files() | {"d2t": ids_W})
    assert found["T8"].verdict == "error"
    assert "accept nothing" in found["T8"].vllm
    assert "instead of offsets" in refusal


def test_t9_the_bias_of_eagle1(tmp_path: Path, target: Path):
    shapes = {"fc.weight": (D, 2 * D)} | layer_shapes("layers.0.", D, ())
    for config, bias, verdict in (
        ({}, True, "warning"),
        ({}, False, "warning"),
        ({"bias": False}, False, "ok"),
        ({"bias": True}, False, "error"),
    ):
        files = tensors_of(shapes | ({"fc.bias": (D,)} if bias else {}))
        found, refusal = findings(write_head(tmp_path / "head", LAYERS | config, files), target)
        assert found["T9"].verdict == verdict
        assert bool(refusal) == (verdict == "error")
        shutil.rmtree(tmp_path / "head")


def test_t10_rotations(tmp_path: Path, target: Path):
    found, _ = look(tmp_path, target, {"rope_theta": ...})
    assert found["T10"].found == "not stated, so base 10000, plain"
    shutil.rmtree(tmp_path / "head")
    found, _ = look(tmp_path, target, YARN)
    assert "ModelOpt trains plainly" in found["T10"].found
    shutil.rmtree(tmp_path / "head")
    (target / "config.json").write_text(json.dumps(CONFIG | YARN))
    found, _ = look(tmp_path, target, {})
    assert "the target yarn" in found["T10"].found
    shutil.rmtree(tmp_path / "head")
    found, _ = look(tmp_path, target, YARN)
    assert found["T10"].verdict == "ok"


def test_the_command_shows_findings_and_fails_on_errors(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture):
    good = write_head(tmp_path / "good", EAGLE3_CONFIG, eagle3_files())
    assert main(["inspect", str(good), "--target", str(target), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["refused"] == ""
    assert [trap["trap"] for trap in report["traps"]] == [f"T{n}" for n in range(1, 11)]
    files = {name: x for name, x in eagle3_files().items() if name != "d2t"}
    bad = write_head(tmp_path / "bad", EAGLE3_CONFIG | {"norm_before_residual": True}, files)
    assert main(["inspect", str(bad), "--target", str(target)]) == 1
    out = capsys.readouterr().out
    assert "SGLang: ignores it, adds to the bare" in out
    assert "jaxspec refuses it: head: it knows 20 of the target's 96 tokens" in out
    assert main(["inspect", str(good)]) == 2
    assert "--target DIR" in capsys.readouterr().err


def test_commands_import_and_export(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture):
    there = write_head(tmp_path / "there", EAGLE3_CONFIG, eagle3_files())
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main(["import", str(there), str(ours), "--target", str(target)]) == 0
    assert main(["export", str(ours), str(back), "--format", "eagle3", "--dtype", "float32"]) == 0
    assert main(["export", str(ours), str(tmp_path / "s"), "--format", "speculators", "--target", str(target)]) == 0
    stated = json.loads((tmp_path / "s" / "config.json").read_text())["speculators_config"]["verifier"]
    assert stated == {"name_or_path": target.name, "architectures": ["Qwen3MoeForCausalLM"]}
    before, after = (load_file(d / "model.safetensors") for d in (there, back))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert main(["export", str(ours), str(tmp_path / "m"), "--format", "medusa"]) == 2
    assert "it has decoder layers" in capsys.readouterr().err
