"""Counts how many of the functions that a model writes are grammatical Python.

Run ``python -m lab.pair.grammar [MODEL]``; without a model it is the packaged one.
"""

import argparse
import ast
from pathlib import Path
from typing import Any

from jaxspec.bench.excerpts import HELD_OUT, load_excerpts
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams

BETWEEN = "\n\n\n"


def whole_functions(text: str) -> list[str]:
    """Returns the functions of a text that have an end."""
    return [part for part in text.split(BETWEEN)[:-1] if part.strip()]


def parses(text: str) -> bool:
    """Says whether a text is Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, MemoryError):
        return False
    return True


def grammatical(model: Path, count: int, tokens: int) -> dict[str, Any]:
    """Lets a model go on from held-out code and then write further functions, and counts those that parse.

    Args:
      model: directory.
      count: prompts.
      tokens: new ones for each.

    Returns:
      By temperature: the number of whole functions that the model wrote or finished, how many of them parse, and how
      many different ones there are.
    """
    excerpts = load_excerpts(HELD_OUT)[:count]
    prompts = [excerpt.prompt for excerpt in excerpts]
    llm, figures = LLM(model, max_model_len=512, max_num_seqs=16, max_logprobs=0), {}
    for temperature in (0.0, 0.7):
        params = [SamplingParams(temperature=temperature, max_tokens=tokens, seed=n) for n in range(len(prompts))]
        functions = []
        for excerpt, output in zip(excerpts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            begun = excerpt.prompt.split(BETWEEN)[-1]
            functions += whole_functions(begun + output.outputs[0].text)
        good = sum(map(parses, functions))
        figures[str(temperature)] = {"functions": len(functions), "parse": good, "different": len(set(functions))}
    return figures


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=demo_model_dir("target"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    for temperature, counts in grammatical(args.model, args.prompts, args.tokens).items():
        share = counts["parse"] / max(1, counts["functions"])
        print(f"temperature {temperature}: {counts}, {share:.1%} parse")


if __name__ == "__main__":
    main()
