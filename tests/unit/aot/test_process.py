"""The process that compiles for GPUs: what it needs, what it says when that is missing, and its errors."""

import sys
from pathlib import Path

import pytest

from jaxspec.aot import process
from jaxspec.errors import ConfigError
from scripts.house_report import ROOT


def test_what_is_needed_fits_the_pinned_jax():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    old = sys.version_info < (3, 12)
    jax = next(
        line.split(";")[0].removeprefix("jax==") for line in lines if line.startswith("jax==") and old == ("<" in line)
    )
    names = {name: version for name, _, version in (package.partition("==") for package in process.packages())}
    assert {version for name, version in names.items() if name.startswith("jax-")} == {jax}
    assert len(names) == (3 if old else 4), "libdevice is a package of its own from CUDA 13 on"
    assert all(names.values()), "every version is pinned"


def test_a_missing_plugin_comes_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(process, "DIRECTORY", tmp_path)
    monkeypatch.setattr(process, "PLUGINS", ("no_such_plugin",))
    why = process.missing()
    assert why is not None
    assert f"-m pip install --no-deps --target {tmp_path} 'jax-cuda" in why
    with pytest.raises(ConfigError, match="which is not installed"):
        process.run("jaxspec.aot.process:target_text", gpu="h100")


def test_results_and_errors_come_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "missing", lambda: None)
    assert process.run("jaxspec.aot.process:target_text", gpu="h200") == process.target_text("h200")
    with pytest.raises(ConfigError, match=r"^jaxspec\.aot\.process:target_text: .*: gpu 'v100' is not described"):
        process.run("jaxspec.aot.process:target_text", gpu="v100")


def test_spills_are_read_from_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    line = (
        "ptxas warning : Registers are spilled to local memory in function 'gelu_4', 504 bytes spill stores, 504 bytes"
    )
    (tmp_path / process.LOG).write_text(f"I1121 subprocess_compilation.cc:349] {line} spill loads\nsomething else\n")
    monkeypatch.setenv(process.DUMP, str(tmp_path))
    assert process.spills() == {"gelu_4": 504}
