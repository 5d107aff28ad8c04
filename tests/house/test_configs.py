"""Every file in configs/ is a value file that parses."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from scripts.house_report import ROOT

CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*") if p.is_file())
TEXT_PROTO = re.compile(r"\s*(#.*|\w+ \{|\w+ \{ .* \}|\w+: (\d[\d.]*|\"[^\"]*\")|\})?")


def text_proto(text: str) -> list[str]:
    """The lines of a protocol buffer in text form, each a comment, a value, or the beginning or end of a message."""
    lines = text.splitlines()
    assert [line for line in lines if not TEXT_PROTO.fullmatch(line)] == []
    assert text.count("{") == text.count("}")
    return [line for line in lines if ":" in line]


PARSERS = {".toml": tomllib.loads, ".json": json.loads, ".txtpb": text_proto}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda p: str(p.relative_to(ROOT)))
def test_config_parses(file: Path):
    assert file.suffix in PARSERS, f"configs hold {', '.join(PARSERS)} only"
    assert PARSERS[file.suffix](file.read_text()), "the file is empty"
