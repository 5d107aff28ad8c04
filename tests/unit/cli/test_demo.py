"""The demo runs on any model directory, prints plain text into a pipe, and writes a complete report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.load.save import save_model
from jaxspec.cli.demo import PROMPTS, DemoArgs, drafter_line, plan_of, speculative_of
from jaxspec.cli.screen import Screen
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.medusa import MedusaSpec
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import Policy
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
WANTED = {
    "plain_tok_per_s", "spec_tok_per_s", "speedup", "speedup_range", "acceptance_length", "dtype",
    "acceptance_per_pos", "identical", "drafter", "k", "draft_cost", "verify_ratio", "prompts", "machine",
    "versions", "batches",
}  # fmt: skip


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
    tokenizer.train_from_iterator([PROMPTS.read_text(encoding="utf-8")], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
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


def test_report_is_complete_and_identical(shown):
    report = shown[1]
    assert sorted(WANTED - report.keys()) == []
    assert report["identical"] is True
    assert (report["drafter"], report["k"], report["batch"]) == ("ngram", 4, 1)
    assert len(report["acceptance_per_pos"]) == 4
    assert report["acceptance_length"] == pytest.approx(1 + sum(report["acceptance_per_pos"]))
    assert report["machine"]["cores"] >= 1
    assert report["model"]["active_parameters"] < report["model"]["parameters"]
    expected = report["plain_tok_per_s"] * report["plain_step_time_s"]
    assert expected == pytest.approx(1, rel=0.5), "one row commits one token per plain step"


def test_piped_output_is_plain_text(shown):
    text = shown[0]
    assert "\x1b" not in text
    assert "speed-up" in text
    assert text.count("the same text") == 2, "the heading and one prompt"


def test_no_color_variable(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Screen(color=True).color
    assert not Screen(color=False).color
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen(color=True).console.color_system is None


def test_named_model_gets_ngram_unless_a_draft_is_named(model: Path):
    assert speculative_of(DemoArgs(model=model))["method"] == "ngram"
    config = speculative_of(DemoArgs(model=model, draft=model, k=3))
    assert config == {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}


def test_the_packaged_target_gets_the_packaged_head():
    plan = plan_of(DemoArgs())
    assert plan.speculative["method"] == "shared_expert"
    assert "shared_expert head, 2.3 M parameters, 5 tokens ahead" in drafter_line(plan.speculative, plan.config)


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompts": 0},
        {"prompts": 1000},
        {"k": 0},
        {"speculative_config": "{"},
        {"speculative_config": "{}", "k": 2},
        {"speculative_config": '{"method": "no"}'},
        {"model": Path("nowhere")},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(model: Path, wrong: dict):
    with pytest.raises(ConfigError):
        plan_of(DemoArgs(**{"model": model, **wrong}))
