"""CPU time of a step with native kernels and with XLA: the demo target, plain and with its head, K = 5.

Engines over the same text run dispatches of eight steps in turns. Pin the process to one core; on a busy machine the
least times are closest to an idle one's.
"""

import argparse
import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.decode.state import init_sampling
from jaxspec.keys import Purpose
from jaxspec.native import product as native
from jaxspec.native.build import library
from jaxspec.native.packing import Packed, pack
from jaxspec.nn.draw import Noise
from jaxspec.nn.steady import row_argmax, softmax
from jaxspec.protocol import Sampling
from jaxspec.pytree import replace
from jaxspec.verify.logits import BANNED, truncate
from pallas_kernels.weight_cases import abstract_weight, random_weight

PROMPTS = ("def fibonacci(n):\n    ", "import numpy as np\n\n", "class Stack:\n    def __init__(self):\n", "Once upon")
STEPS, DISPATCHES, DRAFTS, TURNS = 8, 8, 5, 20


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


def time_matrix(depth: int, columns: int, other: Path | None) -> None:
    """Prints times of one matrix in every format times some rows, in turns with another checkout's kernels if given."""
    ways = {"here": jax.jit(partial(product_by, "jaxspec_product"))}
    if other is not None:
        handle = library("", other / "jaxspec" / "native").handle
        assert handle is not None, "these kernels are compiled as ours are"
        jax.ffi.register_ffi_target("other_product", jax.ffi.pycapsule(handle.jaxspec_product), platform="cpu")
        ways["there"] = jax.jit(partial(product_by, "other_product"))
    for form in ("bfloat16", "int8", "fp8", "mxfp4", "float32"):
        w = pack(random_weight(jax.random.key(1), abstract_weight(form, (), (depth, columns))))
        print(f"{form}, {w.data.nbytes / 1e6:.0f} MB")
        for rows in (1, 2, 4, 8, 48, 512, 2048):
            given = jax.random.normal(jax.random.key(2), (rows, depth)), w
            print(f"  {rows} rows: {in_turns(ways, given)}, the same bits: {alike(ways, given)}")


def product_by(target: str, x_MD: jax.Array, w: Packed) -> jax.Array:
    """Computes a product by the kernels that XLA knows by this name."""
    with mock.patch.object(native, "TARGET", target):
        return native.product(x_MD, w)


def alike(ways: dict[str, Any], given: tuple[Any, ...]) -> bool:
    """Whether all ways give the same bits."""
    first, *others = (np.asarray(way(*given)) for way in ways.values())
    return all(np.array_equal(first, other) for other in others)


def by_sorting(x_BTV: jax.Array, s: Sampling) -> jax.Array:
    """Computes ``truncate`` without min-p by sorting, as before there was a search."""
    ranked = -jnp.sort(-x_BTV, axis=-1)
    last_B = jnp.where(s.top_k_B > 0, s.top_k_B, x_BTV.shape[-1]) - 1
    kth = jnp.take_along_axis(ranked, jnp.broadcast_to(last_B[:, None, None], (*ranked.shape[:2], 1)), axis=-1)
    x_BTV, ranked = (jnp.where(x < kth, BANNED, x) for x in (x_BTV, ranked))
    prob = softmax(ranked)
    nucleus = jnp.where(jnp.cumsum(prob, axis=-1) - prob < s.top_p_B[:, None, None], ranked, jnp.inf)
    return jnp.where(x_BTV < jnp.min(nucleus, axis=-1, keepdims=True), BANNED, x_BTV)


def time_truncation(vocab: int) -> None:
    """Prints least and median times of truncation by sorting and by the search, in turns, for some rows x nodes."""
    for (rows, nodes), (top_k, top_p) in itertools.product([(1, 1), (1, 4), (8, 4)], [(0, 0.9), (50, 1.0), (50, 0.9)]):
        x_BTV = 3 * jax.random.normal(jax.random.key(0), (rows, nodes, vocab))
        sampling = replace(init_sampling(rows, 1), top_k_B=jnp.full(rows, top_k), top_p_B=jnp.full(rows, top_p))
        ways = {"sort": jax.jit(by_sorting), "search": jax.jit(truncate)}
        np.testing.assert_array_equal(*(way(x_BTV, sampling) for way in ways.values()))
        print(f"{vocab} tokens, {rows} x {nodes}, top_k {top_k}, top_p {top_p}: {in_turns(ways, (x_BTV, sampling))}")


def time_draws(vocab: int) -> None:
    """Prints least and median times of drawing tokens by XLA and by the kernel, in turns, for some rows x nodes."""
    for (rows, nodes), top_p in itertools.product([(1, 1), (1, 4), (8, 1), (8, 4)], (1.0, 0.9)):
        key_BX, position_BT = jax.random.key_data(jax.random.split(jax.random.key(0), rows)), jnp.zeros((rows, nodes))
        noise = Noise(key_BX, position_BT.astype(jnp.int32), jnp.ones(rows, bool), Purpose.TARGET)
        x_BTV = 3 * jax.random.normal(jax.random.key(0), (rows, nodes, vocab))
        x_BTV = truncate(x_BTV, replace(init_sampling(rows, 1), top_p_B=jnp.full(rows, top_p)))
        ways = {
            "xla": jax.jit(lambda noise, x: row_argmax(noise.added_to(x))),
            "kernel": jax.jit(lambda noise, x: noise.draw(x)),
        }
        np.testing.assert_array_equal(*(way(noise, x_BTV) for way in ways.values()))
        print(f"one of {vocab} tokens, {rows} x {nodes}, top_p {top_p}: {in_turns(ways, (noise, x_BTV))}")


def in_turns(ways: dict[str, Any], given: tuple[Any, ...]) -> str:
    """Returns least and median CPU times of each way, which take turns, once they are compiled."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        jax.block_until_ready(way(*given))
    for name, way in TURNS * list(ways.items()):
        began = time.process_time()
        jax.block_until_ready(way(*given))
        times[name].append((time.process_time() - began) * 1e3)
    words = [f"{name} {min(ms):.2f} / {np.median(ms):.2f} ms" for name, ms in times.items()]
    if len(times) > 1:
        first, second = times.values()
        words.append(f"second over first {np.median(np.divide(second, first)):.2f}")
    return ", ".join(words)


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=DRAFTS, help="0 for no head")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kernels", nargs="+", default=["native", "xla"])
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--matrix", nargs=2, type=int, help="depth and columns of one matrix, instead of a model")
    parser.add_argument("--other", type=Path, help="with --matrix, a checkout whose kernels take turns with ours")
    parser.add_argument("--sampling", type=int, help="tokens of a vocabulary that is sampled from, instead of a model")
    args = parser.parse_args()
    if args.sampling:
        time_truncation(args.sampling)
        time_draws(args.sampling)
        return
    if args.matrix:
        depth, columns = args.matrix
        time_matrix(depth, columns, args.other)
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
