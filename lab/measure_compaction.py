"""What the smaller sizes of verification are worth: time of a drafter on a model, and compile time.

Three engines over the same weights run the same requests in turns: with all sizes, without packed ones, and without
any. ``--requests`` fewer than ``--rows`` leaves rows idle. The machine does nothing else.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.bench.prompt_source import PromptSource
from jaxspec.decode.compaction import Sizes

SMALLER: Mapping[str, Mapping[str, object]] = {
    "all": {}, "anchors alone": {"packed": ()}, "none": {"packed": (), "anchors": False},
}  # fmt: skip


def build(model: str, drafter: str, rows: int, changes: Mapping[str, object]) -> LLM:
    """Returns an engine whose steps know only some sizes; ``drafter`` is a speculative config in JSON."""
    sizes_of = Sizes.of
    with mock.patch.object(Sizes, "of", lambda *args, **how: replace(sizes_of(*args, **how), **changes)):
        llm = LLM(
            model, speculative_config=json.loads(drafter),
            max_num_seqs=rows, max_model_len=512, prefill_buckets=(128,), max_logprobs=0, compile_cache=False,
        )  # fmt: skip
        llm.finish_compiling()
        return llm


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="smollm2-moe")
    parser.add_argument("--workload", default="code")
    parser.add_argument("--drafter", default='{"method": "ngram", "num_speculative_tokens": 4}')
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--requests", type=int, help="at a time; as many as rows if not given")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    llms, count = {}, args.requests or args.rows
    for name, changes in SMALLER.items():
        began = time.process_time()
        llms[name] = build(args.model, args.drafter, args.rows, changes)
        program = llms[name].engine.programs.programs["dispatch", llms[name].engine.drafter.topology]
        text = program.as_text()
        print(f"{name}: start {time.process_time() - began:.1f} CPU-s, dispatch {len(text) / 1e6:.2f} MB of HLO")
    source = PromptSource(llms["all"].text, llms["all"].model.net.arch.vocab_size)
    prompts = [{"prompt_token_ids": ids} for ids in source.prompts(args.workload, 16, seed=0)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.tokens, ignore_eos=True)
        times_s: dict[str, list[float]] = {name: [] for name in llms}
        for turn in range(args.rounds + 1):
            some = [prompts[(turn * count + i) % len(prompts)] for i in range(count)]
            texts = set()
            for name in np.random.default_rng(turn).permutation(list(llms)):
                began = time.perf_counter()
                outputs = llms[name].generate(some, params, use_tqdm=False)
                times_s[name] += [time.perf_counter() - began] if turn else []  # the first round warms up
                texts.add(str([output.outputs[0].token_ids for output in outputs]))
            assert len(texts) == 1, "the text does not depend on the size"
        for name in list(llms)[1:]:
            ratios = np.log(np.array(times_s[name]) / np.array(times_s["all"]))
            half = 1.96 * ratios.std(ddof=1) / math.sqrt(len(ratios))
            low, middle, high = np.exp([ratios.mean() - half, ratios.mean(), ratios.mean() + half])
            print(
                f"T = {temperature}: all sizes are {middle:.3f} times as fast as {name} ({low:.3f} to {high:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
