"""Checks that the whole script makes a pair that loads, and that a killed run ends with the same weights."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.nn.policy import make_policy
from scripts.house_report import ROOT

pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.slow

LAB = ROOT / "lab"
STEPS = ("--target-steps", "6", "--draft-steps", "6", "--sequences", "3", "--tiny")
CODE = "def f_{0}(value):\n    if value:\n        return [value, {0}]\n    return 'n'\n\n\n"
# Ends the process in the middle of both trainings, as a power cut would.
KILLED = """
import os, sys
import demo_corpus, train_demo
whole, seen = demo_corpus.batch, [0]
def batch(tokens, *, step, **rest):
    if step == int(os.environ["KILL_AT"]) and rest["seed"] == int(os.environ["KILL_SEED"]):
        os._exit(9)
    return whole(tokens, step=step, **rest)
demo_corpus.batch = batch
train_demo.main(sys.argv[1:])
"""
RUN = {"config", "steps", "batch", "tokens_seen", "wall_time_s", "curve", "parameters"}
LOSS = {"held_out_nats_per_token", "held_out_bits_per_byte"}
FILES = {"config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json"}
FILES |= {"tokenizer.json", "tokenizer_config.json"}


def run(library: Path, work: Path, code: str, **environment: str) -> int:
    """Runs the script in a process of its own with one device."""
    command = [sys.executable, "-c", code, "--work", work, "--out", work / "pair", "--root", library, *STEPS]
    paths = os.pathsep.join([str(LAB), str(ROOT)])
    # The optimizer of optax mixes integers and floats.
    flags = {"XLA_FLAGS": "", "PYTHONPATH": paths, "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    return subprocess.run(command, env=os.environ | flags | environment, check=False).returncode


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    sys.path.insert(0, str(LAB))
    import demo_corpus

    sys.path.remove(str(LAB))
    root = tmp_path_factory.mktemp("library")
    for index, name in enumerate((*demo_corpus.HELD_OUT, "a.py", "b.py")):
        text = "".join(CODE.format(100 * index + part) for part in range(30))
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def whole(library: Path, tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("whole")
    assert run(library, work, "import train_demo; train_demo.main()") == 0
    return work / "pair"


def digests(pair: Path) -> dict[str, str]:
    return {n: hashlib.sha256((pair / n / "model.safetensors").read_bytes()).hexdigest() for n in ("target", "draft")}


def test_pair_loads(whole: Path):
    for name, family in (("target", "qwen2_moe"), ("draft", "llama")):
        assert {file.name for file in (whole / name).iterdir()} == FILES
        model = load_model(whole / name, make_policy())
        assert model.net.arch.family == family
        assert model.net.arch.vocab_size == 320
        assert model.generation["eos_token_id"] == 0


def test_provenance_is_complete(whole: Path):
    record = json.loads((whole / "provenance.json").read_text())
    about = {"made_by", "date", "corpus", "versions", "seeds", "balance_weight", "machine"}
    assert set(record) == about | {"target", "draft"}
    assert set(record["target"]) == RUN | LOSS | {"expert_share_by_layer"}
    agreement = {f"{place}_{figure}" for place in ("held_out", "target_text") for figure in ("kl", "agreement")}
    assert set(record["draft"]) == RUN | LOSS | agreement | {"target_sha256", "target_text_rows"}
    assert record["draft"]["target_sha256"] == digests(whole)["target"]
    assert record["target"]["tokens_seen"] == 6 * 2 * 32
    assert [point["step"] for point in record["draft"]["curve"]["held_out"]] == [4, 6]
    assert {"jax", "flax", "optax", "python"} <= set(record["versions"])
    assert str(whole.parent) not in json.dumps(record)


def test_killed_run_ends_with_the_same_weights(library: Path, whole: Path, tmp_path: Path):
    for seed in ("0", "2"):
        assert run(library, tmp_path, KILLED, KILL_AT="5", KILL_SEED=seed) == 9
    assert run(library, tmp_path, "import train_demo; train_demo.main()") == 0
    assert digests(tmp_path / "pair") == digests(whole)
    log = (tmp_path / "runs" / "target" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3, 4, 5, 6]


def test_target_text_follows_the_target(whole: Path):
    files = sorted((whole.parent / "runs").glob("draft-*/text_train/*.npy"))
    text = np.concatenate([np.load(file) for file in files]).astype(np.int32)
    assert text.shape == (4, 33)
    model = load_model(whole / "target", make_policy("float32"))
    position = np.broadcast_to(np.arange(32, dtype=np.int32), (4, 32))
    logits = np.asarray(model.net.apply(model.params, text[:, :-1], position, method="logits_of")[0])
    chosen = np.take_along_axis(logits, text[:, 1:, None], -1)[..., 0]
    gap = logits.max(-1) - chosen
    assert gap[0::2, 7:].max() < 0.05, "even rows are greedy, up to the rounding of bfloat16"
    assert gap[1::2, 7:].max() > 0.05, "odd rows are sampled"
