"""The traps of heads that draft blocks, each seen at least once, in files that other tools could have written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoint.heads.block_traps import LOOKS
from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.heads.findings import Finding
from jaxspec.checkpoint.heads.traps import check_head
from jaxspec.cli.main import main
from jaxspec.models.block_head import BlockSpec
from tests.unit.checkpoint.block_cases import DFLASH2, DSPARK, EVERY, MIXED, block_head, block_spec
from tests.unit.checkpoint.head_cases import CONFIG, write_target
from tests.unit.checkpoint.test_block_heads import VERIFIER, published
from tests.unit.checkpoint.test_heads_import import write_archive


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def findings(directory: Path, target: Path) -> tuple[dict[str, Finding], str]:
    found, refusal = check_head(directory, target)
    assert [finding.trap for finding in found] == list(LOOKS)
    return {finding.trap: finding for finding in found}, refusal


@pytest.mark.parametrize("form", ["native", "dflash", "speculators"])
@pytest.mark.parametrize(("layers", "kind"), [({}, DSPARK), ({"num_hidden_layers": 2}, DFLASH2)])
def test_what_jaxspec_writes_is_free_of_traps(tmp_path: Path, target: Path, form, layers, kind):
    save_head(block_head(block_spec(layers, **kind)), tmp_path / "head", form, verifier=VERIFIER)
    found, refusal = findings(tmp_path / "head", target)
    assert refusal == ""
    assert {finding.trap: finding.found for finding in found.values() if finding.verdict != "ok"} == {}


FREE = {"target_layer_ids": ..., "dflash_config": {"target_layer_ids": ...}}
UNSAID = {"sample_from_anchor": ..., "dflash_config": {"sample_from_anchor": ...}}
CASES: dict[str, tuple[str, str, BlockSpec, dict[str, Any], str]] = {
    "contradiction": ("T11", "error", block_spec(), {"target_layer_ids": [1, 2, 3]}, "the boundaries [2, 3, 4]"),
    "unsaid-taps": ("T11", "warning", block_spec({"num_hidden_layers": 3}), FREE, "z-lab's rule gives [2, 4, 6]"),
    "few-taps": ("T11", "error", block_spec(), FREE | {"aux_hidden_state_layer_ids": [2, 4]}, "2 taps of 32, but fc.w"),
    "anchor": ("T12", "warning", block_spec(), UNSAID, "3 drafts of 4 rows, the anchor's does not; not stated"),
    "anchor-of-dflash": ("T12", "warning", block_spec(), {"dflash_config": {"sample_from_anchor": True}}, "4 drafts"),
    "causal": ("T13", "warning", block_spec(MIXED), {"is_causal": ..., "dflash_config": {"causal": True}}, "by dfl"),
    "use_swa": ("T14", "warning", block_spec(EVERY), {"layer_types": ..., "dflash_config": {"use_swa": True}}, "by "),
    "switch": ("T14", "warning", block_spec(EVERY), {"use_sliding_window": False}, "but use_sliding_window is false"),
    "no-types": ("T14", "warning", block_spec(), {"use_sliding_window": True}, "all layers see"),
    "mask": ("T16", "warning", block_spec(mask_token=1), {}, "begins or ends the target's texts"),
    "scales": ("T17", "warning", block_spec(embedding_scale=2.0, softcap=3.0), {}, "times 2, logits within 3"),
    "theta": ("T19", "warning", block_spec(), {"rope_theta": ..., "rope_parameters": ...}, "10000"),
    "blocks": ("T20", "error", block_spec(), {"block_size": 6}, "4 in dflash_config, 6 at the top"),
    "unsaid-block": ("T20", "warning", block_spec(), {"block_size": ..., "dflash_config": {"block_size": ...}}, "16"),
    "rnn": ("T24", "warning", block_spec(markov_kind="rnn", **DSPARK), {}, "rnn of rank 5"),
    "rank": ("T24", "warning", block_spec(**DSPARK), {"markov_rank": ...}, "in dflash_config alone"),
    "rank-0": ("T24", "warning", block_spec(from_anchor=True), {}, "in a head of DSpark's kind"),
    "last": ("T31", "warning", block_spec(), FREE | {"aux_hidden_state_layer_ids": [2, 4, 8]}, "before the final norm"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_trap_is_seen(tmp_path: Path, target: Path, case: str):
    trap, verdict, of, config, words = CASES[case]
    found, refusal = findings(published(tmp_path / "head", of, **config), target)
    assert found[trap].verdict == verdict, found[trap]
    assert words in found[trap].found
    assert found[trap].cure
    if verdict == "warning":
        assert refusal == ""


def test_speculators_leaves_the_block_of_a_window_unsaid(tmp_path: Path, target: Path):
    of = block_spec(EVERY, window_from_anchor=True, causal=(True, True))
    directory = published(tmp_path / "head", of, "speculators", sliding_window_non_causal=...)
    found, refusal = findings(directory, target)
    assert refusal == ""
    assert (found["T13"].verdict, found["T13"].vllm) == ("warning", "sees the whole block")
    assert (found["T14"].verdict, found["T14"].vllm[:22]) == ("warning", "ends them at every row")


def test_sglang_writes_a_mask_into_the_targets_table(tmp_path: Path, target: Path):
    directory = published(tmp_path / "head", block_spec())
    write_archive(directory / "mask_embedding.pt", {"embedding": np.zeros(32, np.float32)})
    found, _ = findings(directory, target)
    assert "prompts that hold token 7 change" in found["T16"].sglang


def test_a_quantized_target_is_another_one_unless_the_head_was_trained_for_it(tmp_path: Path, target: Path):
    directory = published(tmp_path / "head", block_spec())
    (target / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "fp8"}}))
    found, _ = findings(directory, target)
    assert found["T35"].verdict == "warning"
    assert "the target is fp8; heads are trained for bfloat16 ones" in found["T35"].found
    (directory / "training.json").write_text(json.dumps({"target": {"name": "target"}}))
    assert findings(directory, target)[0]["T35"].verdict == "ok"


def test_the_command_shows_findings_and_fails_on_errors(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture):
    bad = published(tmp_path / "bad", block_spec(), block_size=6)
    assert main(["inspect", str(bad), "--target", str(target)]) == 1
    assert "T20 error" in capsys.readouterr().out
    assert main(["export", str(bad), str(tmp_path / "out"), "--target", str(target)]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
