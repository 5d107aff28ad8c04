"""Named workloads: what kinds of text measurements run on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError

OWN = Path(__file__).resolve().parent / "workloads"
SPEED_BENCH, HUMAN_EVAL, FILE = "speed-bench", "human-eval", "file"


@dataclass(frozen=True)
class Workload:
    """A named workload, with its lengths unless others are asked for.

    Attributes:
      about: it, in words.
      input_tokens: of each prompt, None for as long as it is.
      output_tokens: generated per prompt.
      sampling: settings of its requests, but for their temperature.
      turns: other workloads that its requests come from in turns, with their temperatures; None is the one asked for.
      ends: whether a text ends where the model ends it; what would follow is no text that anybody wants.
      reads: whether its prompts lie in a file or directory that the user names.
    """

    about: str
    input_tokens: int | None
    output_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[str, float | None], ...] = ()
    ends: bool = False
    reads: bool = False

    @classmethod
    def own(cls, about: str) -> "Workload":
        """Returns one whose prompts come with jaxspec, in ``workloads/``."""
        return cls(about, None, 128, ends=True)


WORKLOADS: Mapping[str, Workload] = {
    "chat": Workload.own("questions, advice, roleplay and short pieces of writing, one turn each"),
    "code": Workload.own("beginnings of programs to continue, and questions about code, in turns"),
    "math": Workload.own("word problems, algebra, probability, short proofs"),
    "summarization": Workload.own("texts of about 400 tokens to summarize"),
    "rewriting": Workload.own("translations, corrections and changes of form: answers repeat much of the prompt"),
    "multi-turn": Workload.own("conversations of two or three turns, the last answer missing"),
    SPEED_BENCH: Workload("first turns of SPEED-Bench, of one category or all", None, 128, ends=True, reads=True),
    HUMAN_EVAL: Workload("function heads of HumanEval, continued", None, 128, ends=True, reads=True),
    "held-out": Workload("code of Python's library that the demo pair was not trained on, continued", None, 128),
    "prefill": Workload("long prompts of the held-out code, short answers", 384, 16),
    "shuffled": Workload(
        "tokens of the held-out code in a random order, and a penalty on every repetition: hardly a draft is right",
        64, 128, {"frequency_penalty": 2.0, "presence_penalty": 2.0},
    ),
    "mixed": Workload(
        "held-out code at temperature 0 and shuffled text at the temperature asked for, in turns", None, 128,
        turns=(("held-out", 0.0), ("shuffled", None)),
    ),
    "random": Workload("token ids drawn evenly from the vocabulary; needs no tokenizer", 64, 128),
    FILE: Workload("the prompts of --prompts", None, 128, reads=True),
}  # fmt: skip


def workload_of(name: str) -> Workload:
    """Returns a workload by its name, which for SPEED-Bench may have a category: ``speed-bench/coding``.

    Raises:
      ConfigError: there is none.
    """
    base, slash, _ = name.partition("/")
    if base not in WORKLOADS or (slash and base != SPEED_BENCH):
        raise ConfigError(f"--workload: {name!r} is not known; known are {list(WORKLOADS)}")
    return WORKLOADS[base]


def parse_workload(text: str) -> tuple[str, Path | None]:
    """Splits ``NAME`` or ``NAME=PATH``.

    Raises:
      ConfigError: the workload is not known, needs a path, or takes none.
    """
    name, equals, path = text.partition("=")
    reads = workload_of(name).reads and name != FILE
    if reads and not path:
        raise ConfigError(f"workload {name!r} reads files of yours; give {name}=PATH")
    if equals and not reads:
        raise ConfigError(f"workload {name!r} takes no path, got {text!r}; a file of prompts is --prompts FILE")
    return name, Path(path) if equals else None


def settings(name: str, index: int, temperature: float) -> dict[str, Any]:
    """Returns the sampling settings of a workload's request at a place, for the temperature asked for."""
    turns = workload_of(name).turns
    if turns:
        name, fixed = turns[index % len(turns)]
        temperature = temperature if fixed is None else fixed
    return {"temperature": temperature, **workload_of(name).sampling}
