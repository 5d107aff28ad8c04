"""README, docs and changelog: Python blocks run, commands have those flags, links lead somewhere.

```python no-run marks a block that cannot run.
"""

import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

from jaxspec.cli.arguments import parse
from jaxspec.cli.main import COMMANDS, MODULES
from scripts.house_report import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
# Results are dated and never edited: they have the commands of their day.
LIVING = [page for page in PAGES if page.parent.name != "results"]
BLOCK = re.compile(r"^```(?P<language>\w+)[ \t]*(?P<info>[^\n]*)\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`(?P<code>jaxspec [^`]+)`(?!`)")
FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(#[^)]*)?\)")
PATH = re.compile(r"(?<![\w/.-])(?:jaxspec|pallas_kernels|tests|scripts|configs|lab|docs)/[\w/.-]*[\w/](?![\w*{<])")
MADE_UP = ("newmodel", "2027")  # what a reader is to write
PARSERS = {"json": json.loads, "toml": tomllib.loads}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[re.Match[str]]:
    blocks = (block for block in BLOCK.finditer(page.read_text()) if block["language"] in languages)
    return [block for block in blocks if "no-run" not in block["info"].split()]


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every command that a page shows in a block."""
    for block in blocks(page, "sh", "bash"):
        for line in block["code"].replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


def command_name(words: list[str]) -> str:
    """The longest subcommand that the words after ``jaxspec`` begin with."""
    return next(name for name in (" ".join(words[1:3]), words[1]) if name in COMMANDS)


def arguments_of(name: str) -> type:
    command = import_module(f"jaxspec.cli.{MODULES.get(name, name.replace(' ', '_'))}")
    return get_type_hints(command.run)["args"]


@cache
def flags_of(name: str) -> set[str]:
    """Flags that the help text of a subcommand names."""
    shown = io.StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit):
        parse(arguments_of(name), ["--help"], prog="jaxspec", description="")
    return set(FLAG.findall(shown.getvalue()))


def check_command(words: list[str]) -> None:
    program, *rest = words
    for word in rest:
        if word.startswith("{"):
            json.loads(word)
    if program == "jaxspec":
        name = command_name(words)
        if name != "lm-eval":  # takes the harness's own
            parse(arguments_of(name), words[1 + len(name.split()) :], prog="jaxspec", description="")
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {e for word in rest for e in re.findall(r"\[([\w,]+)\]", word) for e in e.split(",")} <= extras.keys()
    else:
        script = rest.pop(0) if program == "python" else program
        script = rest.pop(0).replace(".", "/") + ".py" if script == "-m" else script
        text = (ROOT / script).read_text()
        assert [flag for flag in rest if flag.startswith("-") and flag.lstrip("-") not in text.replace("_", "-")] == []


@pytest.mark.parametrize("page", [page for page in LIVING if [*commands(page)]], ids=name_of)
def test_commands_are_understood(page: Path):
    for words in filter(None, commands(page)):
        check_command(words)


@pytest.mark.parametrize("page", [page for page in LIVING if SPAN.search(page.read_text())], ids=name_of)
def test_flags_in_the_text_are_known(page: Path):
    for span in SPAN.finditer(page.read_text()):
        words = span["code"].split()
        if words[1].startswith("-"):
            continue
        name, used = command_name(words), set(FLAG.findall(span["code"]))
        assert name == "lm-eval" or used <= flags_of(name), span["code"]


def test_values_parse():
    for page in LIVING:
        for block in blocks(page, *PARSERS):
            PARSERS[block["language"]](block["code"])


@pytest.mark.served
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, in one namespace a page."""
    text, namespace = page.read_text(), {"__name__": "docs"}
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        line = text.count("\n", 0, block.start("code"))
        exec(compile("\n" * line + block["code"], str(page), "exec"), namespace)
    for output in namespace.get("outputs", ()):
        assert output.outputs[0].text.strip(), f"{page.name}: its first example says nothing"


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


def test_the_changelog_has_one_line_each():
    unreleased = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    heading, *lines = filter(None, unreleased.splitlines())
    sections = [line.removeprefix("### ") for line in lines if line.startswith("#")]
    assert heading == "[Unreleased]"
    assert sections == sorted(set(sections), key=["Added", "Changed", "Fixed", "Removed"].index)
    assert [line for line in lines if not line.startswith(("### ", "- "))] == []
    assert [line for line in lines if line.startswith("- ") and not line.endswith(".")] == []


def test_every_page_is_in_the_contents_and_on_the_site():
    contents, site = (ROOT / "docs" / "README.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:] if page.name != "README.md"]
    assert [page for page in pages if page not in contents or page not in site] == []


def test_paths_in_the_text_exist():
    gone = [
        f"{name_of(page)}: {path}"
        for page in LIVING
        for path in PATH.findall(page.read_text())
        if not (ROOT / path.rstrip(".")).exists() and not any(word in path for word in MADE_UP)
    ]
    assert gone == []


def test_the_way_of_a_token_names_functions_that_are_there():
    stations = re.findall(
        r"((?:`\w+\(\)`)) in ((?:`[\w/]+\.py`(?: or )?)+)", (ROOT / "docs" / "architecture.md").read_text()
    )
    assert len(stations) > 15
    missing = [
        f"{function} in {file}"
        for function, files in stations
        for file in re.findall(r"`([^`]+)`", files)
        if f"def {function.strip('`()')}(" not in (ROOT / file).read_text()
    ]
    assert missing == []
