"""The token ids of a workload's prompts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.bench.excerpts import HELD_OUT, load_excerpts
from jaxspec.bench.published import human_eval, speed_bench
from jaxspec.bench.workload import FILE, HUMAN_EVAL, OWN, SPEED_BENCH, workload_of
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError, RequestError
from jaxspec.serve.job_lines import read_line
from jaxspec.serve.request import SamplingParams


@dataclass(frozen=True)
class PromptSource:
    """The token ids of prompts.

    Attributes:
      text: the model's tokenizer, None if it has none.
      vocab_size: V.
      files: where workloads lie that the user has the files of, by name; JSONL for ``file``, as ``jaxspec generate``
        reads it.
    """

    text: Text | None
    vocab_size: int
    files: Mapping[str, Path] = field(default_factory=dict)

    def prompts(self, name: str, count: int, seed: int, input_tokens: int | None = None) -> list[list[int]]:
        """Returns the token ids of prompts, the same for the same arguments.

        Args:
          name: of the workload.
          count: how many; after the last one it starts again with the first.
          seed: of their order, and of what is drawn.
          input_tokens: of each prompt; by default the workload's. Shorter prompts get others in front of them, and
            what is too long in front is cut off.

        Raises:
          ConfigError: the workload is not known, or cannot be made for this model.
        """
        workload = workload_of(name)
        if turns := workload.turns:
            parts = [self.prompts(one, -(-count // len(turns)), seed, input_tokens) for one, _ in turns]
            return [parts[place % len(turns)][place // len(turns)] for place in range(count)]
        size, draws = input_tokens or workload.input_tokens, np.random.default_rng(seed)
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
        base, _, category = name.partition("/")
        if workload_of(name).reads and name not in self.files:
            raise ConfigError(f"workload {name!r} needs " + ("--prompts, a JSONL file" if base == FILE else "a path"))
        if base == SPEED_BENCH:
            return [self._ids(prompt, name) for prompt in speed_bench(self.files[name], category)]
        if base == HUMAN_EVAL:
            return [self._ids(prompt, name) for prompt in human_eval(self.files[name])]
        file = self.files[name] if base == FILE else OWN / f"{name}.jsonl"
        if base == FILE or file.exists():
            return [self._ids(prompt, where) for where, prompt in read_prompts(file)]
        return [self._ids({"prompt": excerpt.prompt}, name) for excerpt in load_excerpts(HELD_OUT)]

    def _ids(self, prompt: Mapping[str, Any], where: str) -> list[int]:
        if "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
        elif self.text is None:
            raise ConfigError(f"{where}: text, and this model has no tokenizer; use the workload random, or give ids")
        elif "messages" in prompt:
            try:
                ids = self.text.encode_chat(**prompt)
            except RequestError as error:
                raise ConfigError(
                    f"{where}: a conversation that this model cannot have ({error}); the workload held-out is "
                    f"text without turns"
                ) from error
        else:
            ids = self.text.encode(prompt["prompt"])
        if not ids or not all(isinstance(i, int) and 0 <= i < self.vocab_size for i in ids):
            raise ConfigError(f"{where}: needs token ids from 0 to {self.vocab_size - 1}, got {ids!r:.80}")
        return list(ids)


def read_prompts(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields where each prompt of a JSONL stands, and the prompt as ``LLM.submit`` takes it.

    Raises:
      ConfigError: it cannot be read, has a bad line, or none.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{file}: prompts cannot be read ({error})") from error
    if not any(data.strip() for data in lines):
        raise ConfigError(f"{file}: no prompts; each line is a JSON object with a prompt")
    for index, data in enumerate(lines):
        if data.strip():
            line = read_line(data, index, SamplingParams())
            if line.error:
                raise ConfigError(f"{file}: line {index + 1}: {line.error}")
            yield f"{file}: line {index + 1}", line.prompt


def _ending_at(pool: list[list[int]], index: int, size: int) -> list[int]:
    """Returns the last ``size`` tokens of a prompt with the prompts before it in front."""
    ids: list[int] = []
    while len(ids) < size:
        ids = pool[index] + ids
        index = (index - 1) % len(pool)
    return ids[-size:]
