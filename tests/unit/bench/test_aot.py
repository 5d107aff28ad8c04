"""The process that compiles for GPUs: what it needs, what it says when that is missing, and its errors."""

import sys
from pathlib import Path

import pytest

from jaxspec.bench import aot
from jaxspec.errors import ConfigError
from scripts.house_report import ROOT


def test_what_is_needed_fits_the_pinned_jax():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    old = sys.version_info < (3, 12)
    jax = next(
        line.split(";")[0].removeprefix("jax==") for line in lines if line.startswith("jax==") and old == ("<" in line)
    )
    names = {name: version for name, _, version in (package.partition("==") for package in aot.packages())}
    assert {version for name, version in names.items() if name.startswith("jax-")} == {jax}
    assert len(names) == 3
    assert all(names.values()), "every version is pinned"


def test_a_missing_plugin_comes_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(aot, "PLACE", tmp_path)
    monkeypatch.setattr(aot, "PLUGINS", ("no_such_plugin",))
    why = aot.missing()
    assert why is not None
    assert f"-m pip install --no-deps --target {tmp_path} 'jax-cuda" in why
    with pytest.raises(ConfigError, match="which is not installed"):
        aot.run("jaxspec.bench.aot:target_text", gpu="h100")


def test_results_and_errors_come_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aot, "missing", lambda: None)
    assert aot.run("jaxspec.bench.aot:target_text", gpu="h200") == aot.target_text("h200")
    with pytest.raises(ConfigError, match=r"^jaxspec\.bench\.aot:target_text: .*: gpu 'v100' is not described"):
        aot.run("jaxspec.bench.aot:target_text", gpu="v100")


def test_spills_are_read_from_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    line = (
        "ptxas warning : Registers are spilled to local memory in function 'gelu_4', 504 bytes spill stores, 504 bytes"
    )
    (tmp_path / aot.LOG).write_text(f"I1121 subprocess_compilation.cc:349] {line} spill loads\nsomething else\n")
    monkeypatch.setenv(aot.DUMP, str(tmp_path))
    assert aot.spills() == {"gelu_4": 504}
