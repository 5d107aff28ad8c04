"""The import contracts of pyproject.toml, which scripts/test checks, notice a broken rule."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.house_report import ROOT

VIOLATIONS = {
    "Rooms import downwards only": ("jaxspec/nn/stray.py", "import jaxspec.decode"),
    "Only nn and aot import pallas_kernels": ("jaxspec/decode/stray.py", "import pallas_kernels"),
    "pallas_kernels imports no jaxspec": ("pallas_kernels/stray.py", "import jaxspec.errors"),
    "perf and topology never import jax": ("jaxspec/perf/stray.py", "import jax"),
    "verify, cache and protocol never import flax": ("jaxspec/verify/stray.py", "import flax.linen"),
    "The packages import neither lab nor scripts nor tests": ("jaxspec/cli/stray.py", "import scripts.house_report"),
}


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    skipped = shutil.ignore_patterns("__pycache__", "demo_model")
    for package in ("jaxspec", "pallas_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_contracts_notice_violations(tree: Path):
    for path, statement in VIOLATIONS.values():
        (tree / path).write_text(f"{statement}\n")
    result = lint_imports(tree)
    assert [c for c in VIOLATIONS if f"{c} BROKEN" not in result.stdout] == [], result.stdout + result.stderr
