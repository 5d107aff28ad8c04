"""Lets the target write, for its draft and its head to learn from."""

import json
from pathlib import Path

import numpy as np

from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from lab.pair.recipe import Recipe

TEMPERATURE = 0.7
AT_ONCE = 128


def prompts(tokens: np.ndarray, count: int, length: int, seed: int) -> np.ndarray:
    """Cuts prompts [count, length] out of a stream, a pure function of the arguments."""
    starts = np.random.default_rng(seed).integers(len(tokens) - length, size=count)
    return np.stack([tokens[start : start + length] for start in starts])


def write(model: Path, data: Path, out: Path, recipe: Recipe) -> dict[str, Path]:
    """Writes JSONL of token ids, half of the rows greedy and half sampled, on from where an earlier call stopped.

    Args:
      model: directory of the target.
      data: token streams.
      out: directory that receives the files, ``train`` and ``held_out``.
      recipe: numbers.
    """
    out.mkdir(parents=True, exist_ok=True)
    files, llm = {name: out / f"{name}.jsonl" for name in ("train", "held_out")}, None
    for seed, (name, file) in enumerate(files.items()):
        count = recipe.texts if name == "train" else max(2, recipe.texts // 10)
        given = prompts(np.load(data / f"{name}.npy"), count, recipe.prompt, seed)
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        file.write_text("".join(whole))  # a kill may have cut the last one off
        done = len(whole)
        for first in range(done, count, AT_ONCE):
            llm = llm or LLM(model, max_model_len=recipe.length, max_num_seqs=AT_ONCE, max_logprobs=0)
            rows = [(n, given[n].tolist()) for n in range(first, min(count, first + AT_ONCE))]
            params = [
                SamplingParams(
                    temperature=TEMPERATURE * (n % 2), seed=n, max_tokens=recipe.length - recipe.prompt, ignore_eos=True
                )
                for n, _ in rows
            ]
            outputs = llm.generate([prompt for _, prompt in rows], params, use_tqdm=False)
            lines = [
                json.dumps({"token_ids": [*prompt, *output.outputs[0].token_ids], "prompt_length": recipe.prompt})
                for (_, prompt), output in zip(rows, outputs, strict=True)
            ]
            with file.open("a") as end:
                end.write("\n".join(lines) + "\n")
            print(f"{name}: {first + len(rows)} of {count} texts", flush=True)
    return files


def read(file: Path) -> np.ndarray:
    """Reads such a file as rows of tokens."""
    return np.array([json.loads(line)["token_ids"] for line in file.read_text().splitlines()], np.int32)
