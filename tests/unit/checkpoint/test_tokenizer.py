"""Reading the tokenizer of a model directory: never by running code that comes with it, and never waiting."""

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody who says yes to whatever is asked on standard input."""
    read, write = os.pipe()
    os.write(write, b"y\n" * 20)
    os.close(write)
    with os.fdopen(read) as file:
        monkeypatch.setattr("sys.stdin", file)
        yield


def foreign(directory: Path, settings: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """A directory whose Python leaves a file called ran when it is run."""
    code = f"open({str(directory / 'ran')!r}, 'w').close()\nclass T: pass\nclass Fast: pass\nclass C: pass\n"
    (directory / "own.py").write_text(code)
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k2"} | (config or {})))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def letters(directory: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate("abc ?")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))


MAPS: list[dict[str, Any]] = [
    {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "T"},
    {"auto_map": {"AutoTokenizer": ["own.T", "own.Fast"]}, "tokenizer_class": "TFast"},
    {"auto_map": {"AutoTokenizer": [None, "own.Fast"]}},
    {"auto_map": ["own.T", None]},
    {"auto_map": {"AutoTokenizer": ["somebody/else--own.T", None]}, "tokenizer_class": "T"},
    {"tokenizer_class": "T"},
]


@pytest.mark.usefixtures("yes")
@pytest.mark.parametrize("settings", MAPS)
@pytest.mark.parametrize("file", ["tiktoken.model", "tokenizer.model", "vocab.json"])
def test_code_of_the_directory_never_runs(tmp_path: Path, settings: dict[str, Any], file: str):
    maps = {"auto_map": {"AutoConfig": "own.C", "AutoTokenizer": ["own.T", None]}}
    foreign(tmp_path, settings, maps)
    (tmp_path / file).write_text("IQ== 0\n")
    with pytest.warns(RuntimeWarning, match="is code that comes with the model, which is never run") as caught:
        assert Text.load(tmp_path) is None
    assert len(caught) == 1
    assert not (tmp_path / "ran").exists()
    assert len(sys.stdin.readlines()) == 20, "nothing was asked"


@pytest.mark.usefixtures("yes")
@pytest.mark.parametrize("settings", MAPS)
def test_tokenizer_json_is_read_without_the_class_that_it_names(tmp_path: Path, settings: dict[str, Any]):
    foreign(tmp_path, settings, {"auto_map": {"AutoConfig": "own.C"}})
    letters(tmp_path)
    text = Text.load(tmp_path)
    assert text is not None
    assert text.encode("cab") == [2, 0, 1]
    assert not (tmp_path / "ran").exists()


def test_a_class_of_transformers_beside_code_of_its_own_is_used(tmp_path: Path):
    settings = {"auto_map": {"AutoTokenizer": ["own.T", None]}, "tokenizer_class": "PreTrainedTokenizerFast"}
    letters(foreign(tmp_path, settings))
    text = Text.load(tmp_path)
    assert text is not None
    assert text.encode("cab") == [2, 0, 1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("tokenizer_config.json", "[" * 100_000),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_broken_files_are_errors(tmp_path: Path, name: str, content: str, own: bool):
    foreign(tmp_path, MAPS[0] if own else {})
    letters(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))) as caught:
        Text.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert "trust_remote_code" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tiktoken.model"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str):
    letters(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}: is not a regular file"):
        Text.load(tmp_path)


def test_nothing_is_said_where_there_is_no_tokenizer(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Text.load(tmp_path) is None


def test_transformers_is_never_asked_to_run_code():
    calls = re.compile(r"\b(?:Auto(?:Tokenizer|Config|Model\w*|Processor)|PreTrained\w+)\.from_pretrained\(([^)]*)\)")
    found = [(file, call) for file in ROOT.glob("jaxspec/**/*.py") for call in calls.findall(file.read_text())]
    assert found
    for file, call in found:
        assert "trust_remote_code=False" in call, file
    assert not [file for file in ROOT.glob("jaxspec/**/*.py") if "trust_remote_code=True" in file.read_text()]
