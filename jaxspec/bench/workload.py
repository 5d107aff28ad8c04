"""Named workloads: the prompts that measurements run on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError
from jaxspec.serve.job_lines import read_line
from jaxspec.serve.request import SamplingParams

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
        raise ConfigError(
            f"{file}: prompts cannot be read ({error!r}); lab/make_demo_prompts.py writes them"
        ) from error
    if not excerpts:
        raise ConfigError(f"{file}: no prompts; lab/make_demo_prompts.py writes them")
    return excerpts


def choose(excerpts: list[Excerpt], count: int, seed: int | None = None) -> list[Excerpt]:
    """Returns the first ``count`` excerpts, in an order drawn from ``seed`` if one is given.

    Raises:
      ConfigError: there are not that many.
    """
    if not 1 <= count <= len(excerpts):
        raise ConfigError(f"prompts: from 1 to {len(excerpts)} are available, got {count}")
    order = range(len(excerpts)) if seed is None else np.random.default_rng(seed).permutation(len(excerpts))
    return [excerpts[i] for i in list(order)[:count]]


def repeat(excerpts: list[Excerpt], count: int) -> list[Excerpt]:
    """Returns ``count`` excerpts, starting again with the first after the last."""
    return [excerpts[i % len(excerpts)] for i in range(count)]


@dataclass(frozen=True)
class Workload:
    """A named workload, with its lengths unless others are asked for.

    Attributes:
      about: it, in words.
      input_tokens: of each prompt, None for as long as it is.
      output_tokens: generated per prompt.
      sampling: settings of its requests, but for their temperature.
      turns: other workloads that its requests come from in turns, with their temperatures; None is the one asked for.
    """

    about: str
    input_tokens: int | None
    output_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    turns: tuple[tuple[str, float | None], ...] = ()


WORKLOADS: Mapping[str, Workload] = {
    "code": Workload("held-out code of the demo, continued", None, 128),
    "prefill": Workload("long prompts of the same code, short answers", 384, 16),
    "shuffled": Workload(
        "tokens of the same code in a random order, and a penalty on every repetition: hardly a draft is right",
        64, 128, {"frequency_penalty": 2.0, "presence_penalty": 2.0},
    ),
    "mixed": Workload(
        "code at temperature 0 and shuffled text at the temperature asked for, in turns", None, 128,
        turns=(("code", 0.0), ("shuffled", None)),
    ),
    "random": Workload("token ids drawn evenly from the vocabulary; needs no tokenizer", 64, 128),
    "file": Workload("the prompts of --prompts", None, 128),
}  # fmt: skip


def settings(name: str, index: int, temperature: float) -> dict[str, Any]:
    """Returns the sampling settings of a workload's request at a place, for the temperature asked for."""
    turns = WORKLOADS[name].turns
    if turns:
        name, fixed = turns[index % len(turns)]
        temperature = temperature if fixed is None else fixed
    return {"temperature": temperature, **WORKLOADS[name].sampling}


@dataclass(frozen=True)
class PromptSource:
    """The token ids of prompts.

    Attributes:
      text: the model's tokenizer, None if it has none.
      vocab_size: V.
      file: JSONL for the workload ``file``, as ``jaxspec generate`` reads it.
    """

    text: Text | None
    vocab_size: int
    file: Path | None = None

    def prompts(self, name: str, count: int, seed: int, input_tokens: int | None = None) -> list[list[int]]:
        """Returns the token ids of prompts, the same for the same arguments.

        Args:
          name: key of ``WORKLOADS``.
          count: how many; after the last one it starts again with the first.
          seed: of their order, and of what is drawn.
          input_tokens: of each prompt; by default the workload's. Shorter prompts get others in front of them, and
            what is too long in front is cut off.

        Raises:
          ConfigError: the workload is not known, or cannot be made for this model.
        """
        if name not in WORKLOADS:
            raise ConfigError(f"workload {name!r} is not known; known are {list(WORKLOADS)}")
        turns = WORKLOADS[name].turns
        if turns:
            parts = [self.prompts(one, -(-count // len(turns)), seed, input_tokens) for one, _ in turns]
            return [parts[place % len(turns)][place // len(turns)] for place in range(count)]
        size, draws = input_tokens or WORKLOADS[name].input_tokens, np.random.default_rng(seed)
        if name == "random":
            return draws.integers(0, self.vocab_size, (count, size or 1)).tolist()
        pool = self.pool(name)
        pool = [pool[i] for i in draws.permutation(len(pool))]
        if name == "shuffled":
            together = [token for ids in pool for token in ids]
            return draws.choice(together, (count, size or 1)).tolist()
        return [pool[i % len(pool)] if size is None else _ending_at(pool, i % len(pool), size) for i in range(count)]

    def pool(self, name: str) -> list[list[int]]:
        """Returns every prompt of a workload that has such, in order.

        Raises:
          ConfigError: it cannot be made for this model.
        """
        return self._lines() if name == "file" else self._code(name)

    def _code(self, name: str) -> list[list[int]]:
        if self.text is None:
            raise ConfigError(f"workload {name!r} is text, and this model has no tokenizer; use the workload random")
        return [self.text.encode(excerpt.prompt) for excerpt in load_excerpts(HELD_OUT)]

    def _lines(self) -> list[list[int]]:
        if self.file is None:
            raise ConfigError("workload 'file' needs --prompts, a JSONL file")
        try:
            lines = self.file.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"{self.file}: prompts cannot be read ({error})") from error
        prompts = []
        for index, data in enumerate(lines):
            if data.strip():
                line = read_line(data, index, SamplingParams())
                if line.error:
                    raise ConfigError(f"{self.file}: line {index + 1}: {line.error}")
                prompts.append(self._ids(line.prompt, index))
        if not prompts:
            raise ConfigError(f"{self.file}: no prompts; each line is a JSON object with a prompt")
        return prompts

    def _ids(self, prompt: Mapping[str, Any], index: int) -> list[int]:
        if "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
        elif self.text is None:
            raise ConfigError(f"{self.file}: line {index + 1} is text, and this model has no tokenizer; give ids")
        elif "messages" in prompt:
            ids = self.text.encode_chat(**prompt)
        else:
            ids = self.text.encode(prompt["prompt"])
        if not ids or not all(isinstance(i, int) and 0 <= i < self.vocab_size for i in ids):
            raise ConfigError(
                f"{self.file}: line {index + 1}: needs token ids from 0 to {self.vocab_size - 1}, got {ids!r:.80}"
            )
        return list(ids)


def _ending_at(pool: list[list[int]], index: int, size: int) -> list[int]:
    """Returns the last ``size`` tokens of a prompt with the prompts before it in front."""
    ids: list[int] = []
    while len(ids) < size:
        ids = pool[index] + ids
        index = (index - 1) % len(pool)
    return ids[-size:]
