"""Two processes train as one does, end together when one is killed, and go on to the bit."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.train.run import train
from jaxspec.train.run_log import without_times
from jaxspec.train.settings import load_run_settings
from tests.oracle.one_of_several import LOST_S, together
from tests.unit.serve.tiny_model import write_tiny_model

STEPS, SAVED, DIES = 6, 3, 5
CONFIG = """
target = "{target}"
out = "{out}"
head = {{kind = "medusa", heads = 1, draft_vocab_size = 20}}
data = {{train = ["{data}"], held_out_fraction = 0.2, length = 12}}
train = {{steps = {steps}, rows = 4, save_every = {saved}, log_every = 1}}
optimizer = {{warmup = 1}}
loss = {{rounds = 1}}
evaluation = {{prompts = 3, prompt_tokens = 6, new_tokens = 4, lengths = [1], temperatures = [1.0]}}
mesh = {{data = 2}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, data and a config."""
    folder = tmp_path_factory.mktemp("hosts")
    write_tiny_model(folder / "target")
    rng = np.random.default_rng(0)
    records = [{"token_ids": rng.integers(1, 30, 10).tolist(), "prompt_length": 4} for _ in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    names = {"target": folder / "target", "out": folder / "two", "data": folder / "data.jsonl"}
    (folder / "run.toml").write_text(CONFIG.format(**names, steps=STEPS, saved=SAVED))
    return folder


def logged(run: Path) -> list[dict[str, Any]]:
    """Entries without the times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [without_times(json.loads(line)) for line in lines]


@pytest.mark.slow
def test_two_processes_train_as_one_and_go_on_to_the_bit(place: Path):
    command = ["train", str(place / "run.toml")]
    first, second = together(command, command, dies=(DIES, place / "two" / "checkpoints" / str(SAVED)))
    second.communicate(timeout=300)
    lost = time.monotonic()
    said = first.communicate(timeout=120)[1]
    assert (first.returncode, second.returncode) == (1, -9), said
    assert time.monotonic() - lost < LOST_S + 30
    assert "another process was lost" in said
    assert "start the same command on all of them again" in said
    before = logged(place / "two")
    assert [entry["step"] for entry in before] == list(range(1, DIES + 1)), "updates after the checkpoint"
    again = together(command, command)
    ends = [process.communicate(timeout=300)[1] for process in again]
    assert [process.returncode for process in again] == [0, 0], ends
    assert f"going on after update {SAVED}" in ends[0]
    assert f"{STEPS} updates done" in ends[0]
    assert ends[1].count("\n") == 1, "one process talks"
    found = logged(place / "two")
    assert found[:DIES] == before, "to the bit"
    assert "k1/t1/acceptance_length" in found[-1]
    assert {"best", "last", "tensorboard", "checkpoints"} < {entry.name for entry in (place / "two").iterdir()}
    settings = load_run_settings(str(place / "run.toml"), ["mesh.data=1"], str(place / "one"))
    train(settings, place / "target")
    for here, there in zip(found, logged(place / "one"), strict=True):
        assert here == pytest.approx(there, rel=1e-5)
