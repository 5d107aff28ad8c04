"""Records how many drafts the demo's drafters would have had accepted at every place of their texts."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from jaxspec.bench.prompt_source import PromptSource
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams

PROMPTS, TOKENS, LONGEST = 16, 64, 5
TEMPERATURES = (0.0, 1.0)


def drafters() -> dict[str, dict[str, str]]:
    """Returns what is recorded, by name."""
    draft, head = str(demo_model_dir("draft")), str(demo_model_dir("head"))
    return {
        "ngram": {"method": "ngram"},
        "draft_model": {"method": "draft_model", "model": draft},
        "shared_expert": {"method": "shared_expert", "model": head},
    }


def accepted(llm: LLM, prompt: list[int], temperature: float, seed: int) -> Iterator[int]:
    """Accepted drafts of one step at each place of a text, -1 where nothing was drafted.

    A text's noise depends on the seed and the place alone, so that a step after any part of it is the step that
    generating all of it would have made there.
    """
    whole = SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, ignore_eos=True)
    text = llm.generate([prompt], whole)[0].outputs[0].token_ids
    one = SamplingParams(temperature=temperature, seed=seed, max_tokens=LONGEST + 1, ignore_eos=True)
    for place in range(TOKENS):
        output = llm.submit([*prompt, *text[:place]], one)
        while not output.outputs[0].token_ids:
            llm.step(1)
        token_ids = output.outputs[0].token_ids
        llm.abort()
        if token_ids[: TOKENS - place] != text[place : place + len(token_ids)]:
            raise SystemExit(
                f"place {place}: a step gave {token_ids}, the text is {text[place : place + len(token_ids)]}"
            )
        yield len(token_ids) - 1 if output.metrics.num_draft_tokens else -1


def main() -> None:
    """Writes lines of a digit per place, a dot where nothing was drafted, after a heading for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="text file to write")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    chosen = parser.parse_args()
    lines: list[str] = []
    for name, config in drafters().items():
        llm = LLM(
            demo_model_dir("target"), speculative_config={**config, "num_speculative_tokens": LONGEST},
            max_model_len=640, max_num_seqs=1, max_logprobs=0, prefill_buckets=(32, 256),
        )  # fmt: skip
        source = PromptSource(llm.text, llm.model.net.arch.vocab_size)
        for workload in ("held-out", "shuffled"):
            for temperature in TEMPERATURES:
                lines.append(f"# {name} {workload} {temperature:g}")
                for seed, prompt in enumerate(source.prompts(workload, chosen.prompts, 0)):
                    counts = accepted(llm, prompt, temperature, seed)
                    lines.append("".join("." if count < 0 else str(count) for count in counts))
    chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
