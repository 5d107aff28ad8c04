"""The README's Python blocks run, in order, in one namespace; ```python no-run marks one that cannot."""

import re
from pathlib import Path

import pytest

from scripts.house_report import ROOT

README = ROOT / "README.md"
BLOCK = re.compile(r"^```python[ \t]*(?P<info>[^\n]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@pytest.mark.served
def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text, namespace = README.read_text(), {"__name__": "readme"}
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.finditer(text):
        if "no-run" not in block["info"].split():
            line = text.count("\n", 0, block.start("code"))
            exec(compile("\n" * line + block["code"], str(README), "exec"), namespace)
