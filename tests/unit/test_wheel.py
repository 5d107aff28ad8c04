"""The wheel, installed in an environment of its own outside the checkout, runs its first commands."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import jaxspec
from scripts.house_report import ROOT

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "No matching distribution found for hatchling" in built.stderr:
        pytest.skip("no package index that has the build backend")
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an environment that has the wheel, and what it depends on from this one; and an empty home."""
    place = tmp_path_factory.mktemp("elsewhere")
    venv.create(place / "env", with_pip=False)
    python = place / "env" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    (site,) = (place / "env" / "lib").glob("python*/site-packages")
    # Files named in it are not read again, so that this environment's checkout is not seen.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (place / "home").mkdir()
    return place


def run(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {"HOME": str(place / "home"), "PATH": os.environ["PATH"], "XLA_FLAGS": QUICK, "COLUMNS": "120"}
    return subprocess.run(
        [str(place / "env" / "bin" / command[0]), *command[1:]],
        cwd=place, env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=500,
    )  # fmt: skip


def test_what_is_in_it(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    assert {f"{package}/py.typed" for package in ("jaxspec", "pallas_kernels")} <= names
    assert {"jaxspec/__main__.py", "jaxspec/configs/train/eagle3.toml"} <= names
    assert {f"jaxspec/demo_model/{part}/model.safetensors" for part in ("target", "draft", "head")} <= names
    assert "jaxspec/demo_model/smollm2_moe_head/head.npz" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "lab/"))]
    assert f"\nVersion: {jaxspec.__version__}\n" in about
    for line in ("Author: The jaxspec authors", "Classifier: Typing :: Typed", "License-Expression: Apache-2.0"):
        assert f"\n{line}\n" in about


def test_versions(place: Path):
    where = run(place, "python", "-c", "import jaxspec, pallas_kernels; print(jaxspec.__file__)")
    assert where.stdout.startswith(str(place / "env")), where.stderr
    for command in (["python", "-m", "jaxspec", "--version"], ["jaxspec", "-V"]):
        shown = run(place, *command)
        assert shown.stdout == f"jaxspec {jaxspec.__version__}\n", shown.stderr


def test_one_prompt(place: Path):
    small = ["--max-model-len", "64", "--prefill-buckets", "16", "--max-num-seqs", "1", "--max-logprobs", "0"]
    shown = run(place, "jaxspec", "generate", "--prompt", "def read(path):", "--max-tokens", "8", *small)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout) > 8
    said = shown.stderr.splitlines()
    assert said[0] == "jaxspec: loading"
    assert any(line.startswith("jaxspec: compiling: 4 programs in ") for line in said), said
    assert "without speculation; --speculative-config switches it on" in said[-1]
    assert list((place / "home" / ".cache" / "jaxspec" / "xla").glob("*-cache")), "the next start is quicker"


@pytest.mark.slow
def test_the_demo(place: Path):
    flags = ["--quick", "--prompts", "1", "--max-tokens", "12", "--repetitions", "1"]
    shown = run(place, "jaxspec", "demo", *flags, "--report", "report.json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "the same text]" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert (place / "report.json").stat().st_size > 1000
