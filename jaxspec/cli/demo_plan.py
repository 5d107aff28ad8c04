"""What ``jaxspec demo`` shows and measures: the model, its drafter, two scenes, and prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.bench.excerpts import HELD_OUT, Excerpt, choose, load_excerpts
from jaxspec.bench.prompt_source import read_prompts
from jaxspec.bench.workload import OWN
from jaxspec.cli.drafters import default_speculation
from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.serve.demo_pair import DEMO, resolve_model, resolve_speculation
from jaxspec.serve.llm import Prompt
from jaxspec.serve.upcycled_model import NAME as UPCYCLED

QUESTION = "How does a virus differ from a bacterium? Do antibiotics help with a cold?"
PROGRAM = '''class Account:
    """A bank account."""

    def __init__(self, owner: str, balance: float = 0.0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount: float) -> None:'''


@dataclass(frozen=True)
class Scene:
    """A prompt to watch.

    Attributes:
      title: what it is.
      shown: its text, of which the answer goes on with the last line where ``goes_on``.
      prompt: as ``LLM.stream`` takes it.
      goes_on: whether the answer continues the text.
    """

    title: str
    shown: str
    prompt: Prompt
    goes_on: bool = True


@dataclass(frozen=True)
class Length:
    """How much is shown and measured.

    Attributes:
      kinds: of prompts, workloads that come with jaxspec.
      prompts: of each kind.
      shown_tokens, tokens: most tokens of an answer, watched and measured.
      time_s: of the measurement, but each prompt is answered once.
    """

    kinds: tuple[str, ...] = ("chat", "code")
    prompts: int = 4
    shown_tokens: int = 96
    tokens: int = 48
    time_s: float = 25.0


QUICK = Length(prompts=2, shown_tokens=48, tokens=24, time_s=0.0)
FULL = Length(("chat", "code", "math", "summarization", "rewriting", "multi-turn"), 8, 128, 96, 240.0)


@dataclass(frozen=True)
class DemoPlan:
    """What the arguments come down to.

    Attributes:
      name: of the model, as the user says it.
      model: its directory.
      speculative: speculative_config.
      scenes: to watch.
      prompts: to measure, by kind.
      length: how much.
    """

    name: str
    model: Path
    speculative: dict[str, Any]
    scenes: Sequence[Scene]
    prompts: Mapping[str, Sequence[Prompt]]
    length: Length


def plan_of(name: str, speculative_config: str | None, length: Length, say: Callable[[str], object]) -> DemoPlan:
    """Checks what is asked for; where the real model cannot be had, it plans for the pair in the package and says so.

    Args:
      name: of the model.
      speculative_config: JSON, None for what comes with the model.
      length: how much to show.
      say: called with a line that the user should read.

    Raises:
      ConfigError: something is not usable.
    """
    speculative = None if speculative_config is None else _parsed(speculative_config)
    try:
        model = resolve_model(name)
    except ConfigError as error:
        if name != UPCYCLED:
            raise
        say(f"{error}")
        say(f"Showing {DEMO} instead, a tiny model that comes with jaxspec and writes simple code.")
        name, model, speculative = DEMO, resolve_model(DEMO), None
    speculative = dict(resolve_speculation(speculative) or default_speculation(name))
    methods.parse(speculative)
    if name == DEMO:
        excerpts = load_excerpts(HELD_OUT)
        held_out = [excerpt.prompt for excerpt in choose(excerpts, len(length.kinds) * length.prompts)]
        return DemoPlan(name, model, speculative, list(map(_scene, excerpts[:2])), {"held-out code": held_out}, length)
    scenes = [
        Scene("A question", QUESTION, {"messages": [{"role": "user", "content": QUESTION}]}, goes_on=False),
        Scene("The beginning of a program", PROGRAM, PROGRAM),
    ]
    own = {kind: [dict(prompt) for _, prompt in read_prompts(OWN / f"{kind}.jsonl")] for kind in length.kinds}
    prompts = {kind: some[: length.prompts] for kind, some in own.items()}
    return DemoPlan(name, model, speculative, scenes, prompts, length)


def _scene(excerpt: Excerpt) -> Scene:
    return Scene(f"{excerpt.file}, line {excerpt.line}", excerpt.prompt, excerpt.prompt)


def _parsed(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"demo: --speculative-config is not a JSON object ({error})") from error
