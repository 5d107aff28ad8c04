"""``jaxspec token-map`` counts answers, and says what the most frequent tokens cover."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxspec.cli.main import main

LINES = [{"token_ids": [9, *[n % 7 + 20] * 6, 300 + n], "prompt_length": 1} for n in range(40)]


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


def test_the_most_frequent_tokens_of_answers(answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "map.npy"
    assert main(["token-map", "demo", str(answers), "--size", "7", "--output", str(out)]) == 0
    np.testing.assert_array_equal(np.load(out), np.arange(20, 27))
    told = capsys.readouterr().err
    assert re.search(r"map.npy written: 7 of 1024 tokens, 85.71% of 280 in the answers; 85.71% of a tenth", told)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--size", "0"], "--size: from 1 to the model's 1024 tokens, got 0"),
        (["--size", "2000"], "--size: from 1 to the model's 1024 tokens, got 2000"),
        (["--output", "map.txt"], "--output: the file's name must end in .npy, got map.txt"),
        (["--output", "nowhere/map.npy"], "--output: there is no directory nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(answers: Path, flags: list[str], why: str, capsys: pytest.CaptureFixture):
    assert main(["token-map", "demo", str(answers), *flags]) == 2
    assert capsys.readouterr().err == f"jaxspec: {why}\n"


def test_files_are_needed(capsys: pytest.CaptureFixture):
    assert main(["token-map", "demo"]) == 2
    assert "name the files whose answers are counted" in capsys.readouterr().err
