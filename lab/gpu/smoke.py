"""Runs kernels once against their references, then the demo pair through ``LLM``; a line of JSON each."""

import argparse
import json
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.aot.kernel_cases import cases_of, operations
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.sharding.compiler_options import compiler_options
from lab.gpu.timing import side_by_side
from pallas_kernels.backend import Implementation
from pallas_kernels.case import Case
from pallas_kernels.select import SlowKernelWarning

CASES = {  # of each operation, of the sizes and forms that decide
    "add_norm": ("qwen3_30b_a3b_1", "gpt_oss_120b_4", "deepseek_v3_16"),
    "choose_places": (
        "deepseek-v3.2-chain", "deepseek-v3.2-tree", "deepseek-v3.2-pool", "glm-5-chain", "deepseek-v4-flash-plain",
    ),
    "chosen_attention": (
        "deepseek-v3.2-chain", "deepseek-v3.2-tree", "deepseek-v3.2-pool", "deepseek-v3.2-prefill", "glm-5-plain",
        "deepseek-v4-flash-chain", "deepseek-v4-flash-all", "deepseek-v4-flash-prefill", "deepseek-v4-pro-plain",
    ),
    "few_rows_dense": ("qwen3_30b_qkv_1", "qwen3_30b_qkv_256", "qwen3_30b_qkv_int8_4", "deepseek_v3_latents_4"),
    "grouped_matmul": ("qwen3_30b_a3b_up", "qwen3_30b_a3b_gradients", "gpt_oss_20b_down"),
    "heads_dense": (
        "deepseek_v3_queries_16", "deepseek_v3_values_16", "kimi_k2_int8_queries_4", "glm_4_7_flash_queries_4",
        "glm_4_7_flash_values_4",
    ),
    "heads_to_cache": ("qwen3_30b_a3b_1_1", "qwen3_30b_a3b_pool", "gpt_oss_120b_ring"),
    "latents_to_cache": ("deepseek_v3_1_1", "deepseek_v3_pool", "glm_5_8"),
    "recurrent_steps": ("qwen3_next_B8_T8", "kimi_linear_B8_T8", "nemotron_3_nano_B1_T1", "minimax_01_B1_T1"),
    "route": ("qwen3_30b_a3b_1", "qwen3_30b_a3b_64", "gpt_oss_120b_16", "deepseek_v3_16"),
    "routed_experts": (
        "qwen3_30b_a3b_1", "qwen3_30b_a3b_64", "gpt_oss_120b_1", "gpt_oss_120b_64", "deepseek_v3_of_8_8",
    ),
    "verify_attention": (
        "qwen3-30b-a3b-chain", "qwen3-30b-a3b-tree", "gpt-oss-window-chain", "gpt-oss-full-tree", "qwen3-30b-a3b-pool",
        "deepseek-v3-of-8-chain", "deepseek-v3-of-8-pool", "qwen3-30b-a3b-prefill", "gpt-oss-window-prefill",
        "gpt-oss-full-prefill", "qwen3-30b-a3b-prefill-pool", "deepseek-v3-of-8-prefill", "deepseek-v3-chain",
        "deepseek-v3-tree", "deepseek-v3-prefill",
    ),
}  # fmt: skip
DRAFTERS = {
    "draft": {"method": "draft_model", "model": "demo"},
    "head": {"method": "shared_expert", "model": "demo"},
    "ngram": {"method": "ngram"},
}
BACKENDS: dict[str, tuple[Implementation, Implementation]] = {
    "triton": ("triton", "interpret"),
    "mosaic": ("mosaic", "mosaic_interpret"),
}
SIDE_BY_SIDE = 16


def main() -> None:
    """Prints what ran, what it computed and how long it took; an error ends one line only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="*", default=operations(), help="operations whose cases run")
    parser.add_argument("--by", choices=list(BACKENDS), default="triton")
    parser.add_argument(
        "--drafters", nargs="*", default=list(DRAFTERS), choices=list(DRAFTERS), help="of the demo pair"
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("error", SlowKernelWarning)
    tiny = jax.default_backend() != "gpu"
    _show(devices=str(jax.devices()), jax=jax.__version__)
    _check_kernels(args.ops, BACKENDS[args.by][tiny])
    for name in args.drafters[: 1 if tiny else None]:
        rows, tokens = (1, 8) if tiny else (8, 128)
        _attempt(f"demo {name}", partial(_demo, DRAFTERS[name], rows, tokens))


def _check_kernels(ops: list[str], by: Implementation) -> None:
    """Compiles many cases side by side, then runs each."""
    tiny = by.endswith("interpret")
    cases: dict[str, Case] = {}
    for op in ops:
        some = [case for case in cases_of(op) if case.mosaic or not by.startswith("mosaic")]
        some = [case for case in some if case.size == "tiny"][:1] if tiny else [c for c in some if c.name in CASES[op]]
        cases |= {f"{op} {case.name}": case for case in some}
    names = list(cases)
    for begin in range(0, len(names), SIDE_BY_SIDE):
        jobs = {name: partial(_make, cases[name], by) for name in names[begin : begin + SIDE_BY_SIDE]}
        for name, made in side_by_side(jobs).items():
            _attempt(name, partial(_compare, cases[name], made))


def _make(case: Case, by: Implementation) -> tuple[Any, Any, Any]:
    """Returns a case's arguments, and programs of the kernel and of its reference."""
    args = case.random(jax.random.key(0))
    kernel, reference = (jax.jit(case.call(how)).lower(*args).compile(compiler_options()) for how in (by, "xla"))
    return args, kernel, reference


def _compare(case: Case, made: Any) -> dict[str, Any]:
    if isinstance(made, Exception):
        raise made
    args, kernel, reference = made
    error = 0.0
    for ours, exact in zip(*(jax.tree.leaves(run(*args)) for run in (kernel, reference)), strict=True):
        wide, right = np.asarray(ours, np.float64), np.asarray(exact, np.float64)
        error = max(error, float(np.abs(wide - right).max() / np.abs(right).max()))
    return {"ok": error <= case.tolerance, "error": error}


def _demo(config: dict[str, Any], rows: int, tokens: int) -> dict[str, Any]:
    """Whether speculation changes no token of the demo's prompts, half of them sampled, and rates of both ways."""
    began, target = time.perf_counter(), demo_model_dir("target")
    excerpts = json.loads((target.parent / "held_out_prompts.json").read_text(encoding="utf-8"))
    prompts = [excerpt["prompt"] for excerpt in excerpts[:rows]]
    llm = LLM(
        target, speculative_config=config | {"num_speculative_tokens": 4}, dtype="bfloat16", max_num_seqs=rows,
        max_model_len=512, prefill_buckets=(256,),
    )  # fmt: skip
    llm.finish_compiling()
    report: dict[str, Any] = {"build_s": round(time.perf_counter() - began, 1)}
    texts: dict[str, list[Any]] = {}
    for name, speculative in (("plain", False), ("speculative", None)) * 2:  # the first of each warms up
        params = [
            SamplingParams(
                temperature=0.7 * (i % 2), seed=i, max_tokens=tokens, ignore_eos=True, speculative=speculative
            )
            for i in range(rows)
        ]
        began = time.perf_counter()
        texts[name] = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
        report[f"{name}_tok_per_s"] = round(rows * tokens / (time.perf_counter() - began), 1)
    same = sum(a == b for a, b in zip(texts["plain"], texts["speculative"], strict=True))
    return {"ok": same == rows, "same_texts": f"{same} of {rows}", **report}


def _attempt(name: str, measure: Callable[[], dict[str, Any]]) -> None:
    began = time.perf_counter()
    try:
        report = measure()
    except Exception as error:
        traceback.print_exception(error)
        report = {"ok": False, "failed": f"{type(error).__name__}: {str(error)[:500]}"}
    _show(name=name, **report, time_s=round(time.perf_counter() - began, 1))


def _show(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
