"""Times drafts of 1 to 4 tokens by the mixture's head beside plain decoding, prompt by prompt, one row, greedy.

Run ``python -m lab.upcycle.compare_lengths [--prompts 8] [--tokens 64]`` on a machine that does nothing else. Each way
answers each prompt twice, in turns; the quicker one of each counts.
"""

import argparse
import json
import math
import statistics
import time
from typing import Any

from jaxspec import LLM, SamplingParams
from jaxspec.bench.workload import OWN
from jaxspec.serve.upcycled_model import NAME

LENGTHS = (0, 1, 2, 3, 4)
FIRST = 3  # prompts before it are those of the demo


def answer(llm: LLM, prompt: dict[str, Any], params: SamplingParams) -> tuple[float, list[int], float]:
    """Returns seconds, token ids, and tokens per pass."""
    began = time.perf_counter()
    ask = llm.chat(prompt["messages"], params) if "messages" in prompt else llm.generate(prompt["prompt"], params)
    took_s, output = time.perf_counter() - began, ask[0]
    return took_s, list(output.outputs[0].token_ids), output.metrics.mean_acceptance_length


def main() -> None:
    """Prints one line per kind of text: speed-up and tokens per pass by speculation length."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    sizes: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 1, "max_logprobs": 0, "prefill_buckets": (128,)}
    sizes |= {"enable_prefix_caching": False, "use_tqdm_on_load": False}
    plain = LLM(NAME, **sizes)
    ways = {0: plain}
    for length in LENGTHS[1:]:
        head = {"method": "eagle3", "model": NAME, "num_speculative_tokens": length}
        ways[length] = LLM(plain.model, speculative_config=head, **sizes)
    for llm in ways.values():
        llm.finish_compiling()
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    for kind in ("chat", "code"):
        lines = (OWN / f"{kind}.jsonl").read_text().splitlines()[FIRST : FIRST + args.prompts]
        ratios: dict[int, list[float]] = {k: [] for k in LENGTHS}
        passes: dict[int, list[float]] = {k: [] for k in LENGTHS}
        same = 0
        for prompt in map(json.loads, lines):
            runs = [{k: answer(llm, prompt, params) for k, llm in ways.items()} for _ in range(2)]
            best_s = {k: min(run[k][0] for run in runs) for k in LENGTHS}
            same += all(runs[0][k][1] == runs[0][0][1] for k in LENGTHS)
            for k in LENGTHS:
                ratios[k].append(best_s[0] / best_s[k])
                passes[k].append(runs[0][k][2])
        means = {k: math.exp(statistics.mean(map(math.log, ratios[k]))) for k in LENGTHS}
        figures = ", ".join(f"K={k} {means[k]:.2f}x {statistics.mean(passes[k]):.2f}" for k in LENGTHS[1:])
        print(f"{kind}: {figures}; {same} of {len(lines)} texts the same", flush=True)


if __name__ == "__main__":
    main()
