"""Measures the time to the first text of the demo with its head, and how long prompts of several lengths are read.

    python -m lab.measure_start first           # again for a warm start; --length auto
    python -m lab.measure_start prompts

CPU seconds hold on a machine that does other work, too; the cold start is that of an empty JAX_COMPILATION_CACHE_DIR.
"""

import argparse
import time

import jax
import numpy as np

from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams

LENGTHS, ROUNDS, SHORT = (20, 85, 300, 1000, 2000), 9, 4


def load(length: int | str, rows: int) -> LLM:
    """Loads the demo's target and head."""
    head = {"method": "shared_expert", "model": str(demo_model_dir("head")), "num_speculative_tokens": length}
    return LLM("demo", speculative_config=head, max_num_seqs=rows, max_model_len=2048, max_logprobs=0)


def show_first(length: int | str) -> None:
    """Prints times since the process started: first text, its end, everything compiled."""
    began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    with open("/proc/self/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    began += ticks / 100

    def show(what: str) -> None:
        print(f"{what:20}{time.time() - began:7.1f} s wall {time.process_time():7.1f} s CPU", flush=True)

    llm, seen = load(length, 1), False
    show("ready for requests")
    for _ in llm.stream("def fibonacci(n):\n    ", SamplingParams(temperature=0.0, max_tokens=24)):
        if not seen:
            show("first text")
        seen = True
    show("24 tokens")
    llm.finish_compiling()
    show("everything compiled")


def show_prompts() -> None:
    """Prints CPU milliseconds: of a prompt alone; of several with a token each."""
    llm = load(5, SHORT)
    llm.finish_compiling()
    programs, state, rng = llm.engine.programs, llm.engine.state, np.random.default_rng(0)
    for length in LENGTHS:
        times_s = []
        for _ in range(ROUNDS):
            prompt = rng.integers(1, llm.model.net.arch.vocab_size, length).astype(np.int32)
            began = time.process_time()
            state = programs.prefill(state, 0, prompt)
            jax.block_until_ready(state)
            times_s.append(time.process_time() - began)
        print(f"{length:5} tokens {np.median(times_s) * 1e3:8.1f} ms", flush=True)
    llm.engine.reset(state)
    once = SamplingParams(temperature=0.0, max_tokens=1)
    for length in (20, 85):
        times_s = []
        for _ in range(ROUNDS):
            ids = [{"prompt_token_ids": rng.integers(1, 4096, length).tolist()} for _ in range(SHORT)]
            began = time.process_time()
            llm.generate(ids, once, use_tqdm=False)
            times_s.append(time.process_time() - began)
        print(f"{SHORT} x {length} tokens {np.median(times_s) * 1e3:8.1f} ms, a token each", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("first", "prompts"))
    parser.add_argument("--length", default="5")
    args = parser.parse_args()
    if args.what == "first":
        show_first(int(args.length) if args.length.isdigit() else args.length)
    else:
        show_prompts()
