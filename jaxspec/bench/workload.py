"""Named prompts that measurements run on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import ConfigError


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
        found = [Excerpt(str(e["file"]), int(e["line"]), str(e["prompt"])) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: prompts cannot be read ({error!r}); scripts/make_demo_prompts.py writes them"
        ) from error
    if not found:
        raise ConfigError(f"{file}: no prompts; scripts/make_demo_prompts.py writes them")
    return found


def choose(excerpts: list[Excerpt], count: int, seed: int | None = None) -> list[Excerpt]:
    """The first ``count`` excerpts, in an order drawn from ``seed`` if one is given.

    Raises:
      ConfigError: there are not that many.
    """
    if not 1 <= count <= len(excerpts):
        raise ConfigError(f"prompts: from 1 to {len(excerpts)} are available, got {count}")
    order = range(len(excerpts)) if seed is None else np.random.default_rng(seed).permutation(len(excerpts))
    return [excerpts[i] for i in list(order)[:count]]


def repeat(excerpts: list[Excerpt], count: int) -> list[Excerpt]:
    """``count`` excerpts; behind the last one it starts again with the first."""
    return [excerpts[i % len(excerpts)] for i in range(count)]
