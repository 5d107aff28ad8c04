"""Seeds faults one at a time into a copy of the project and notes which test of the quick suite catches each.

``python lab/mutation_check.py [--only PART_OF_A_PATH] [--report docs/results/DATE-mutations.md]``. The faults are in
``mutations.toml`` beside this file: a file, a text that stands in it exactly once, another one, why that is a fault,
and the tests to ask first. What those miss goes to the whole quick suite with ``--rest``.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)
FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
LIMIT_S = 240  # a fault may well make a loop endless
ENDLESS = f"(still running after {LIMIT_S} s)"
BOTH_HALVES = (("not served and not slow", True), ("served and not slow", False))


@dataclass(frozen=True)
class Fault:
    """One change of a file that some test must notice."""

    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    @contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """Has the fault in a copy of the project for a while.

        Raises:
          SystemExit: the text does not stand there exactly once.
        """
        path = tree / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.file}: {text.count(self.old)} times, not once: {self.old!r}")
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


def run_tests(tree: Path, tests: tuple[str, ...], marks: str, *, quick: bool, first: bool = True) -> list[str]:
    """Runs tests, to the first failure if asked to; returns the names of those that fail."""
    flags = {"XLA_FLAGS": QUICK} if quick else {}
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", **flags}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-m", marks, *tests]
    command += ["-x"] if first else []
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [ENDLESS]
    if done.returncode in (0, 5):  # 5: none of them is in this half
        return []
    if done.returncode == 4:
        raise SystemExit(f"no such tests: {done.stderr.strip()}")
    return FAILURE.findall(done.stdout) or [f"(pytest ended with {done.returncode}: {done.stdout[-300:]})"]


def catch(tree: Path, fault: Fault, *, rest: bool) -> str | None:
    """Returns the first test that fails with the fault: of those named for it, then of the whole quick suite."""
    for tests in (fault.tests, ("tests",))[: 1 + rest]:
        for marks, quick in BOTH_HALVES:
            caught = run_tests(tree, tests, marks, quick=quick)
            if caught:
                return caught[0]
    return None


def false_alarms(tree: Path, tests: list[str]) -> list[str]:
    """Returns the tests that fail without any fault, too."""
    return [
        name for marks, quick in BOTH_HALVES for name in run_tests(tree, (*tests,), marks, quick=quick, first=False)
    ]


def report(results: list[dict[str, str]]) -> str:
    """Returns the results as a page."""
    caught = sum(bool(result["caught"]) for result in results)
    lines = [
        "# Results: seeded faults (November 2026)", "",
        f"`python lab/mutation_check.py`: {caught} of {len(results)} faults are caught by the quick suite, each by the "
        "first test named. Every fault is one changed line; they are in `lab/mutations.toml`.", "",
        "| file | fault | caught by |", "|---|---|---|",
    ]  # fmt: skip
    for result in results:
        test = result["caught"].split("tests/")[-1] or "**missed**"
        lines.append(f"| `{result['file']}` | {result['why']} | `{test}` |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the check; returns 1 where a fault is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose file or reason has this in it")
    parser.add_argument("--rest", action="store_true", help="ask the whole quick suite where the named tests pass")
    parser.add_argument("--report", type=Path, help="file for the table")
    parser.add_argument("--log", type=Path, help="JSON lines, one a fault; faults that it has are not run again")
    asked = parser.parse_args()
    seeded = tomllib.loads((ROOT / "lab" / "mutations.toml").read_text())["fault"]
    faults = [Fault(**{**fault, "tests": tuple(fault["tests"])}) for fault in seeded]
    faults = [fault for fault in faults if asked.only in fault.file or asked.only in fault.why]
    known = (
        [json.loads(line) for line in asked.log.read_text().splitlines()] if asked.log and asked.log.exists() else []
    )
    results = {result["why"]: result for result in known}
    with TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", "site", "runs", "build")
        shutil.copytree(ROOT, tree, ignore=skipped)
        for fault in faults:
            if fault.why in results:
                continue
            began = time.monotonic()
            with fault.applied(tree):
                caught = catch(tree, fault, rest=asked.rest) or ""
            results[fault.why] = {"file": fault.file, "why": fault.why, "caught": caught}
            sys.stdout.write(f"{time.monotonic() - began:6.0f} s  {fault.why}: {caught or 'MISSED'}\n")
            sys.stdout.flush()
            if asked.log:
                with asked.log.open("a") as log:
                    log.write(json.dumps(results[fault.why]) + "\n")
        caught = {results[fault.why]["caught"] for fault in faults} - {"", ENDLESS}
        alarms = false_alarms(tree, sorted(caught))
    if alarms:
        raise SystemExit(f"these fail without a fault, too: {alarms}")
    if asked.report:
        asked.report.write_text(report([results[fault.why] for fault in faults]))
    return int(any(not results[fault.why]["caught"] for fault in faults))


if __name__ == "__main__":
    raise SystemExit(main())
