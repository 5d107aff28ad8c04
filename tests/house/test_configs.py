"""Every file in configs/ is a value file that parses."""

import json
import tomllib
from pathlib import Path

import pytest

from scripts.house_report import ROOT

CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*") if p.is_file())
PARSERS = {".toml": tomllib.loads, ".json": json.loads}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_config_parses(file: Path):
    assert file.suffix in PARSERS, f"configs hold {', '.join(PARSERS)} only"
    assert PARSERS[file.suffix](file.read_text()), "the file is empty"
