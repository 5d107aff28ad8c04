"""The limits of the house: sizes, docstrings, names, comments, suppressions, and nothing of one machine."""

import re
import subprocess
from pathlib import Path

import pytest

from scripts.house_report import PACKAGES, PLACES, ROOT, by_room, duplicates, survey

SOURCES = survey(*PLACES)
ROOMS = by_room(SOURCES)
VAGUE = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
MACHINE_PATH = re.compile(r"(?<![\w.:~/$}-])/(?:home|Users|root|work|opt|srv)/\w")
REGISTRY = re.compile(r"pypi\.org|pythonhosted\.org|index-ur[l]|find-link[s]|//[^/\s]+/simpl[e]")
PIN = re.compile(r"[\w.-]+==[\w.]+(; python_version (<|>=) \"3\.\d+\")?")
UNLISTED = {".git", ".venv", ".cache", "build", "dist", "runs", "__pycache__"}


def tree_files() -> list[Path]:
    """Every file that git keeps or would keep; without git, every file outside the ignored directories."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = listing.stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        inside = (p.relative_to(ROOT) for p in ROOT.rglob("*"))
        names = [str(p) for p in inside if not any(part in UNLISTED for part in p.parts)]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def tree_texts() -> dict[str, str]:
    texts = {}
    for file in tree_files():
        data = file.read_bytes()
        if b"\0" not in data[:4096]:
            texts[str(file.relative_to(ROOT))] = data.decode("utf-8", "replace")
    return texts


def test_files_are_short():
    assert [f"{s.path}: {s.lines} lines" for s in SOURCES if s.lines > 400] == []


def test_functions_are_short():
    assert [f"{f.where}: {f.lines} lines" for s in SOURCES for f in s.functions if f.lines > 60] == []


def test_no_block_stands_twice():
    assert duplicates([s for s in SOURCES if s.path.startswith(PACKAGES)]) == []


def test_modules_say_what_they_are():
    assert [s.path for s in SOURCES if not s.docstring] == []


def test_modules_have_telling_names():
    assert [s.path for s in SOURCES if VAGUE & set(Path(s.path).with_suffix("").parts)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_comments_are_few(room: str):
    comments, lines = sum(s.comments for s in ROOMS[room]), sum(s.lines for s in ROOMS[room])
    assert comments < 0.09 * lines or comments == 0, f"{comments} comment lines of {lines}"


def test_suppressions_are_few():
    found = {s.path: s.suppressions for s in (*SOURCES, *survey("tests")) if s.suppressions}
    assert sum(found.values()) <= 25, found


def test_git_keeps_nothing_else_at_the_top():
    """Such as what a measurement wrote."""
    files = {"CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "mkdocs.yml", "pyproject.toml", ".gitignore"}
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    assert {name for name in kept if name and "/" not in name} <= files


def test_files_name_no_machine():
    own = f"{ROOT}/"
    found = [
        f"{name}: {line.strip()[:120]}"
        for name, text in tree_texts().items()
        if own in text or MACHINE_PATH.search(text)
        for line in text.splitlines()
        if own in line or MACHINE_PATH.search(line)
    ]
    assert found == [], "write paths relative to the project or to a variable"


def test_files_name_no_registry():
    found = [
        f"{name}: {line.strip()[:120]}"
        for name, text in tree_texts().items()
        if REGISTRY.search(text)
        for line in text.splitlines()
        if REGISTRY.search(line)
    ]
    assert found == [], "where packages come from is the machine's setting"


def test_pins_are_exact():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert [pin for pin in pins if not PIN.fullmatch(pin)] == []
