"""Several processes run one command: they write the file of one process, and end together when one falls silent."""

import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.cli.main import main
from jaxspec.errors import ConfigError
from jaxspec.sharding import hosts
from tests.oracle.one_of_several import LOST_S, together
from tests.unit.serve.tiny_model import write_tiny_model

REQUESTS = 40
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


def records(file: Path) -> dict[int, Any]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {line["index"]: line["token_ids"] for line in lines}
    assert len(found) == len(lines), "every request exactly once"
    return found


def wait_for(output: Path, count: int, process: Any) -> None:
    while len(records(output)) < count:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.mark.slow
def test_a_slow_process_is_waited_for_and_a_silent_one_ends_the_job(place: Path):
    auto = {"num_speculative_tokens": "auto", "max_num_speculative_tokens": 1, "verify_budget": "auto"}
    speculation = json.dumps({"method": "draft_model", "model": str(place / "model"), **auto})
    asked, output = (
        command(place, "two.jsonl", "--mesh", "expert=2", "--speculative-config", speculation),
        place / "two.jsonl",
    )
    first, second = together(asked, asked)
    wait_for(output, 4, first)
    second.send_signal(signal.SIGSTOP)
    time.sleep(1)
    before = len(records(output))
    time.sleep(2)
    assert len(records(output)) == before < REQUESTS, "one waits for the other"
    second.send_signal(signal.SIGCONT)
    wait_for(output, before + 1, first)
    second.send_signal(signal.SIGSTOP)
    silent = time.monotonic()
    said = first.communicate(timeout=120)[1]
    second.kill()
    second.communicate()
    assert first.returncode not in (0, None), said
    assert time.monotonic() - silent < LOST_S + 30
    assert f"another process was lost, or silent for {LOST_S} s" in said
    assert "start the same command on all of them again" in said
    assert before < len(records(output)) < REQUESTS, "it was in the middle"
    again = together(asked, asked, reads=place / "reads")
    ends = [process.communicate(timeout=300)[1] for process in again]
    assert [process.returncode for process in again] == [0, 0], ends
    assert f"{REQUESTS} requests" in ends[0]
    assert "requests" not in ends[1].replace("all processes", ""), "one process talks"
    assert records(output) == records(place / "one.jsonl")
    check_reads(place)


def check_reads(place: Path) -> None:
    """Of the experts each process has read its own, and all other tensors whole."""
    sizes = {name: x.nbytes for name, x in load_file(place / "model" / "model.safetensors").items()}
    experts = {name: int(name.partition(".experts.")[2].partition(".")[0]) for name in sizes if ".experts." in name}
    count = max(experts.values()) + 1
    for number in range(2):
        seen = json.loads((place / f"reads-{number}.json").read_text())
        own = {name for name, expert in experts.items() if expert // (count // 2) == number}
        assert set(seen["mapped"]) == (sizes.keys() - experts.keys()) | own
        assert seen["taken"] == {name: sizes[name] for name in seen["mapped"]}


@pytest.mark.slow
def test_processes_with_different_weights_and_settings_say_so(place: Path, tmp_path: Path):
    shutil.copytree(place / "model", tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = min(tensors, key=lambda n: tensors[n].nbytes)
    save_file(tensors | {name: tensors[name] + np.ones(1, tensors[name].dtype)}, tmp_path / "model/model.safetensors")
    one = command(place, "three.jsonl", "--mesh", "expert=2")
    other = [str(tmp_path / "model") if part == str(place / "model") else part for part in one]
    processes = together(one, [*other, "--max-num-seqs", "2"])
    for process in processes:
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 2, said
        assert "model: processes [1] have another than process 0; settings: processes [1] have another" in said
    assert not (place / "three.jsonl").exists()


def test_nobody_at_the_address():
    with pytest.raises(ConfigError, match=r"did not meet at localhost:9 .*same --coordinator-address HOST:PORT"):
        hosts.initialize("localhost:9", 2, 1, initialization_timeout_s=0)
    with pytest.raises(ConfigError, match="the coordinator's address is HOST:PORT, got 'somewhere'"):
        hosts.initialize("somewhere", 2, 1)


@pytest.mark.parametrize(
    ("own", "data", "expert", "both"),
    [((0, 1), (0, 2), (0, 1), (0, 2)), ((2, 3), (1, 2), (0, 1), (1, 2)), ((1,), (0, 2), (1, 2), (1, 4))],
)
def test_the_share_of_a_process(
    own: tuple[int, ...], data: tuple[int, int], expert: tuple[int, int], both: tuple[int, int]
):
    devices = np.arange(4).reshape(2, 2)
    mesh: Any = SimpleNamespace(
        axis_names=("data", "expert"), shape={"data": 2, "expert": 2}, devices=devices, local_devices=own
    )
    assert (hosts.local_share(mesh, "data"), hosts.local_share(mesh, "expert")) == (data, expert)
    assert hosts.local_share(mesh, "data", "expert") == both


def test_devices_that_are_no_even_share():
    mesh: Any = SimpleNamespace(axis_names=("data",), shape={"data": 4}, devices=np.arange(4), local_devices=(0, 2))
    with pytest.raises(ConfigError, match=r"places \[0, 2\] of 4 along data, which is no even share"):
        hosts.local_share(mesh, "data")


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
