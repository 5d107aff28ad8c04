"""Several processes run one command: they write the file of one process, and end together when one is lost."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.cli.main import main
from jaxspec.errors import ConfigError
from jaxspec.sharding import hosts
from tests.unit.serve.tiny_model import write_tiny_model

REQUESTS, LOST_S = 24, 10
ENGINE = ["--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "64", "--prefill-buckets", "16"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, requests, and what one process writes for them."""
    folder = tmp_path_factory.mktemp("hosts")
    write_tiny_model(folder / "model")
    asked = [
        {"prompt": f"the cat {i} sat on a mat", "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        for i in range(REQUESTS)
    ]
    (folder / "asked.jsonl").write_text("".join(json.dumps(request) + "\n" for request in asked))
    assert main(command(folder, "one.jsonl")) == 0
    return folder


def command(folder: Path, output: str, *more: str) -> list[str]:
    files = ["--model", str(folder / "model"), "--input", str(folder / "asked.jsonl"), "--output", str(folder / output)]
    return ["generate", *files, *ENGINE, "--max-logprobs", "0", *more]


def both(*commands: list[str]) -> list[subprocess.Popen]:
    """Starts processes of one device each that meet at a free port."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    together = ["--coordinator-address", f"localhost:{port}", "--num-processes", str(len(commands))]
    together += ["--mesh", f"expert={len(commands)}", "--lost-timeout", str(LOST_S), "--meeting-timeout", "60"]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "jaxspec.cli.main", *one, *together, "--process-id", str(number)],
            env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )
        for number, one in enumerate(commands)
    ]  # fmt: skip


def records(file: Path) -> dict[int, Any]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {line["index"]: line["token_ids"] for line in lines}
    assert len(found) == len(lines), "every request exactly once"
    return found


def test_a_lost_process_ends_the_job_and_the_next_run_completes_it(place: Path):
    auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 1, "verify_budget": "auto"}
    speculation = json.dumps({"method": "draft_model", "model": str(place / "model"), **auto})
    asked, output = command(place, "two.jsonl", "--speculative-config", speculation), place / "two.jsonl"
    first, second = both(asked, asked)
    while len(records(output)) < 4:
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.05)
    second.send_signal(signal.SIGKILL)
    lost = time.monotonic()
    said = first.communicate(timeout=120)[1]
    second.communicate()
    assert first.returncode == 2, said
    assert time.monotonic() - lost < LOST_S + 30
    assert "another process was lost" in said
    assert "start the same command on all of them again" in said
    assert 4 <= len(records(output)) < REQUESTS, "it was in the middle"
    again = both(asked, asked)
    ends = [process.communicate(timeout=300)[1] for process in again]
    assert [process.returncode for process in again] == [0, 0], ends
    assert f"{REQUESTS} requests" in ends[0]
    assert "requests" not in ends[1].replace("all processes", ""), "one process talks"
    assert records(output) == records(place / "one.jsonl")


def test_processes_with_different_weights_and_settings_say_so(place: Path, tmp_path: Path):
    shutil.copytree(place / "model", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = min(tensors, key=lambda n: tensors[n].nbytes)
    save_file(tensors | {name: tensors[name] + np.ones(1, tensors[name].dtype)}, tmp_path / "model/model.safetensors")
    one = command(place, "three.jsonl")
    other = [str(tmp_path / "model") if part == str(place / "model") else part for part in one]
    processes = both(one, [*other, "--max-num-seqs", "2"])
    for process in processes:
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 2, said
        assert "model: processes [1] have another than process 0; settings: processes [1] have another" in said
    assert not (place / "three.jsonl").exists()


def test_nobody_at_the_address():
    with pytest.raises(ConfigError, match=r"did not meet at localhost:9 .*same --coordinator-address HOST:PORT"):
        hosts.meet("localhost:9", 2, 1, meeting_s=0)
    with pytest.raises(ConfigError, match="the coordinator's address is HOST:PORT, got 'somewhere'"):
        hosts.meet("somewhere", 2, 1)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--distributed"], "several processes share a file of requests"),
        (["--process-id", "1"], "--num-processes and --process-id say nothing alone; give --coordinator-address"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "--prompt", "a", *flags]) == 2
    assert said in capsys.readouterr().err
