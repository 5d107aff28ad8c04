"""Every command's help: groups, one default for each flag, no None, named positionals, an example, exit statuses."""

import re
import shlex
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import ClassVar, get_type_hints

import pytest

import jaxspec
from jaxspec.cli.arguments import arguments_of, parse
from jaxspec.cli.examples import EXAMPLES
from jaxspec.cli.generate import SamplingFlags
from jaxspec.cli.main import COMMANDS, MODULES, main
from jaxspec.serve.request import SamplingParams

# Settings of single requests that are mappings or lists, or that a batch of texts has no use for: in JSON lines alone.
IN_LINES_ALONE = {
    "allowed_token_ids", "bad_words", "detokenize", "logit_bias", "output_kind", "prompt_logprobs",
    "truncate_prompt_tokens", "spaces_between_special_tokens", "structured_outputs", "timeout_s",
    "return_routed_experts",
}  # fmt: skip


OURS = [command for command in COMMANDS if command != "lm-eval"]  # the harness parses its own


def kind_of(command: str) -> type:
    return get_type_hints(import_module(f"jaxspec.cli.{MODULES.get(command, command.replace(' ', '_'))}").run)["args"]


def help_text(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("command", OURS)
def test_help(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = help_text(command, capsys)
    assert "None" not in shown
    assert "(default: )" not in shown
    assert "(default: False)" not in shown
    assert "Example:\n  jaxspec " in shown
    assert "Exit status: 0 " in shown
    assert not re.search(r"usage: .*(PATH PATH|STR STR)", shown)
    for other in ("Colour", "quantis", " behind "):
        assert other not in shown


@pytest.mark.parametrize("command", OURS)
def test_every_argument_has_help(command: str):
    for argument in arguments_of(kind_of(command)):
        about = [note.help for note in argument.annotation.__metadata__ if getattr(note, "help", None)]
        assert about, argument.path
        hints = [note.help_behavior_hint for note in argument.annotation.__metadata__ if hasattr(note, "help")]
        assert "by default" not in about[-1] or hints[-1] == "", f"two defaults of {argument.path}"


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_parse(command: str):
    for line in EXAMPLES[command]:
        words = shlex.split(line)
        name = " ".join(words[1:3]) if " ".join(words[1:3]) in COMMANDS else words[1]
        rest = words[1 + len(name.split()) :]
        assert parse(kind_of(name), rest, prog="", description="") is not None


def test_flags_that_many_commands_share_are_in_groups(capsys: pytest.CaptureFixture[str]):
    shown = help_text("generate", capsys)
    titles = re.findall(r"^\W*((?:[a-z-]+ )?options)\W*$", shown, re.MULTILINE)
    assert titles == [
        "options", "sampling options", "engine options", "speculation options", "multi-device options",
        "multi-host options",
    ]  # fmt: skip


def test_sampling_flags_are_those_of_sampling_params():
    flags = {f.name for f in fields(SamplingFlags)} - {"sampling_seed"} | {"seed"}
    assert flags == {f.name for f in fields(SamplingParams)} - IN_LINES_ALONE
    assert SamplingFlags().given() == {}
    given = SamplingFlags(sampling_seed=7, stop=("a",), skip_special_tokens=False, speculative=False).given()
    assert given == {"seed": 7, "stop": ["a"], "skip_special_tokens": False, "speculative": False}
    assert SamplingParams.from_mapping(given).seed == 7


@dataclass(frozen=True)
class Inner:
    """Inner flags.

    Attributes:
      size, weight: Of it,
        in kilograms.
    """

    GROUP: ClassVar = "inner"

    size: int = 3
    weight: float | None = None


@dataclass(frozen=True)
class Outer:
    """Outer flags.

    Attributes:
      names: Several.
      loud: A switch.
      inner: Nested.
    """

    GROUPS: ClassVar = {"of names": ("names",)}

    names: tuple[str, ...] = ()
    loud: bool = False
    inner: Inner = field(default_factory=Inner)


def test_groups_are_flattened_and_built_again(capsys: pytest.CaptureFixture[str]):
    assert parse(Outer, [], prog="p", description="") == Outer()
    parsed = parse(Outer, ["--names", "a", "b", "--loud", "--weight", "2"], prog="p", description="")
    assert parsed == Outer(("a", "b"), True, Inner(3, 2.0))
    with pytest.raises(SystemExit):
        parse(Outer, ["--help"], prog="p", description="")
    shown = capsys.readouterr().out
    assert "of names options" in shown
    assert "--names STR ..." in shown
    assert re.search(r"--weight FLOAT +Of it, in kilograms\.", shown)
    assert "--no-loud" not in shown


def test_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]):
    for flag in ("--version", "-V"):
        assert main([flag]) == 0
        assert capsys.readouterr().out == f"jaxspec {jaxspec.__version__}\n"
    assert main(["generat"]) == 2
    assert "'generat' is no command; did you mean generate?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    shown = capsys.readouterr().out
    assert "bench compare" in shown
    assert "--version (-V)" in shown
