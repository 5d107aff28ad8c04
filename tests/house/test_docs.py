"""README and docs: their Python blocks run, their links lead somewhere; ```python no-run marks a block that cannot."""

import re
from pathlib import Path

import pytest

from scripts.house_report import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python[ \t]*(?P<info>[^\n]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(#[^)]*)?\)")


def blocks(page: Path) -> list[re.Match[str]]:
    return [block for block in BLOCK.finditer(page.read_text()) if "no-run" not in block["info"].split()]


@pytest.mark.served
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, in one namespace a page."""
    text, namespace = page.read_text(), {"__name__": "docs"}
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        line = text.count("\n", 0, block.start("code"))
        exec(compile("\n" * line + block["code"], str(page), "exec"), namespace)


def test_links_lead_to_files():
    broken = [
        f"{page.relative_to(ROOT)}: {link['target']}"
        for page in PAGES
        for link in LINK.finditer(page.read_text())
        if "://" not in link["target"] and not (page.parent / link["target"]).exists()
    ]
    assert not broken


def test_a_stranger_reads_the_readme_to_the_end():
    assert len(README.read_text().splitlines()) <= 250
