"""Excerpts of Python's library that the demo pair was not trained on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError

HELD_OUT = Path(__file__).resolve().parents[1] / "demo_model" / "held_out_prompts.json"


@dataclass(frozen=True)
class Excerpt:
    """A prompt and where it was cut from.

    Attributes:
      file: name of the source file.
      line: its first line, from 1.
      prompt: text.
    """

    file: str
    line: int
    prompt: str


def load_excerpts(file: Path) -> list[Excerpt]:
    """Reads a JSON list of ``{"file", "line", "prompt"}``.

    Raises:
      ConfigError: the file is missing, empty or not such a list.
    """
    try:
        entries: Any = json.loads(file.read_text(encoding="utf-8"))
        excerpts = [Excerpt(str(e["file"]), int(e["line"]), str(e["prompt"])) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: prompts cannot be read ({error!r}); python -m lab.pair.make writes them") from error
    if not excerpts:
        raise ConfigError(f"{file}: no prompts; python -m lab.pair.make writes them")
    return excerpts


def choose(excerpts: list[Excerpt], count: int) -> list[Excerpt]:
    """Returns the first ``count`` excerpts.

    Raises:
      ConfigError: there are not that many.
    """
    if not 1 <= count <= len(excerpts):
        raise ConfigError(f"prompts: from 1 to {len(excerpts)} are available, got {count}")
    return excerpts[:count]
