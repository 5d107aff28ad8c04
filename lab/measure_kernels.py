"""CPU time of a step with native kernels and with XLA: the demo target, plain and with its head, K = 5.

Engines over the same text run dispatches of eight steps in turns. Pin the process to one core; on a busy machine the
least times are closest to an idle one's.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.native.packing import pack
from jaxspec.native.product import product
from pallas_kernels.weight_cases import abstract_weight, random_weight

PROMPTS = ("def fibonacci(n):\n    ", "import numpy as np\n\n", "class Stack:\n    def __init__(self):\n", "Once upon")
STEPS, DISPATCHES, DRAFTS = 8, 8, 5


def build(kernels: str, rows: int, drafts: int, quantization: str) -> LLM:
    """An engine, and what its start took."""
    head = {"method": "shared_expert", "model": "demo", "num_speculative_tokens": drafts}
    began = time.process_time()
    llm = LLM(
        "demo", kernels=kernels, quantization=quantization, max_num_seqs=rows, max_model_len=1024, max_logprobs=0,
        speculative_config=head if drafts else None, compile_cache=False,
    )  # fmt: skip
    llm.finish_compiling()
    print(f"{kernels}: start {time.process_time() - began:.1f} CPU-s")
    return llm


def fill(llm: LLM, rows: int) -> None:
    """Rows in the middle of their texts."""
    llm.abort()
    for row in range(rows):
        llm.submit(PROMPTS[row % len(PROMPTS)], SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True))
    llm.step(1)
    while llm.engine.reads:
        llm.step(1)
    llm.step(1)


def times_ms(llm: LLM, topology) -> list[float]:
    """CPU time per step, of each dispatch."""
    engine, times = llm.engine, []
    for _ in range(DISPATCHES):
        began = time.process_time()
        engine.scheduler.state, report = engine.programs.dispatch(engine.state, topology, STEPS)
        jax.block_until_ready(report)
        times.append((time.process_time() - began) * 1e3 / STEPS)
    return times


def time_matrix(depth: int, columns: int) -> None:
    """Prints the least times of one matrix in every format, times some rows."""
    run = jax.jit(product)
    for form in ("bfloat16", "int8", "fp8", "mxfp4", "float32"):
        w, words = pack(random_weight(jax.random.key(1), abstract_weight(form, (), (depth, columns)))), []
        for rows in (1, 6, 48):
            x, times = jnp.ones((rows, depth), jnp.float32), []
            for _ in range(16):
                began = time.process_time()
                jax.block_until_ready(run(x, w))
                times.append(time.process_time() - began)
            words.append(f"{rows} rows {min(times) * 1e3:.2f} ms")
        print(f"{form}, {w.data.nbytes / 1e6:.0f} MB: {', '.join(words)}")


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=DRAFTS, help="0 for no head")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kernels", nargs="+", default=["native", "xla"])
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--matrix", nargs=2, type=int, help="depth and columns of one matrix, instead of a model")
    args = parser.parse_args()
    if args.matrix:
        time_matrix(*args.matrix)
        return
    llms = {kernels: build(kernels, args.rows, args.drafts, args.quantization) for kernels in args.kernels}
    by_name: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for name, llm in llms.items():
            for topology in llm.engine.programs.drafters:
                fill(llm, args.rows)
                by_name.setdefault((name, topology.drafts), []).extend(times_ms(llm, topology))
    for (name, drafts), times in sorted(by_name.items(), key=lambda item: item[0][1]):
        least, quartile, median = np.percentile(times, (0, 25, 50))
        words = f"{args.rows} rows, {drafts} drafts, {name}, {args.quantization}"
        print(f"{words}: {least:.2f} ms per step at least, quartile {quartile:.2f}, median {median:.2f}")


if __name__ == "__main__":
    main()
