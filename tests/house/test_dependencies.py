"""What the packages import is declared, and what is declared is imported."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from scripts.house_report import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"jaxspec", "pallas_kernels"}
# Imported only where a user has them: an experiment tracker, engines to compare with, a reader of Parquet.
GUESTS = {"wandb", "vllm", "torch", "triton", "lm_eval", "pyarrow"}
BESIDE = {"wire"}  # lies beside the scripts that run in those engines' environments
BROUGHT = {"jaxlib": "jax"}
# Reached through transformers: its fast tokenizers, and what compiles chat templates, which it does not ask for.
NEEDED = {"jinja2", "tokenizers"}


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement)[0].lower().replace("_", "-")


def imported() -> dict[str, str]:
    """Top-level modules that are not Python's own or ours, with a file that imports each."""
    modules: dict[str, str] = {}
    for package in sorted(OWN):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                modules |= {name.partition(".")[0]: str(file.relative_to(ROOT)) for name in names}
    known = {*sys.stdlib_module_names, *OWN, *BESIDE, "scripts", ""}
    return {module: file for module, file in modules.items() if module not in known}


def test_imports_are_declared_and_hard_dependencies_imported():
    hard = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    optional = PROJECT["optional-dependencies"]
    extras = {name_of(r) for name in ("train", "plots", "ray", "eval") for r in optional[name]}
    distributions = packages_distributions()
    used, undeclared = set(), {}
    for module, file in imported().items():
        names = {name.lower().replace("_", "-") for name in distributions.get(module, [BROUGHT.get(module, module)])}
        names |= {BROUGHT[module]} if module in BROUGHT else set()
        used |= names
        if not names & (hard | extras) and module not in GUESTS:
            undeclared[module] = file
    assert undeclared == {}
    assert hard - used - NEEDED == set(), "nothing imports them"
