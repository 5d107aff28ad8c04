"""Runs every kernel once against its reference, then the demo pair through ``LLM``; a line of JSON each."""

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
from pallas_kernels.backend import Implementation
from pallas_kernels.case import Case
from pallas_kernels.select import SlowKernelWarning

REAL = {  # one or two cases of each operation, of the sizes that decide
    "qwen3_30b_qkv_1", "qwen3_30b_qkv_int8_4", "qwen3_30b_a3b_up", "qwen3_30b_a3b_1", "gpt_oss_120b_64",
    "deepseek_v3_of_8_8", "qwen3-30b-a3b-chain", "qwen3-30b-a3b-tree", "deepseek-v3-of-8-chain",
}  # fmt: skip
DRAFTERS = {
    "draft": {"method": "draft_model", "model": "demo"},
    "head": {"method": "shared_expert", "model": "demo"},
    "ngram": {"method": "ngram"},
}


def main() -> None:
    """Prints what ran, what it computed and how long it took; an error ends one line only."""
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("error", SlowKernelWarning)
    gpu = jax.default_backend() == "gpu"
    _show(devices=str(jax.devices()), jax=jax.__version__)
    for op in operations():
        cases = [case for case in cases_of(op) if (case.name in REAL if gpu else case.size == "tiny")]
        for case in cases if gpu else cases[:1]:
            _attempt(f"{op} {case.name}", partial(_kernel, case, "triton" if gpu else "interpret"))
    for name, config in DRAFTERS.items() if gpu else [("draft", DRAFTERS["draft"])]:
        rows, tokens = (8, 128) if gpu else (1, 8)
        _attempt(f"demo {name}", partial(_demo, config, rows, tokens))


def _kernel(case: Case, how: Implementation) -> dict[str, Any]:
    args = case.random(jax.random.key(0))

    def call(by: Implementation) -> np.ndarray:
        return np.asarray(jax.jit(case.call(by))(*args), np.float64)

    ours, reference = call(how), call("xla")
    error = float(np.abs(ours - reference).max() / np.abs(reference).max())
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
        traceback.print_exc()
        report = {"ok": False, "failed": f"{type(error).__name__}: {str(error)[:500]}"}
    _show(name=name, **report, time_s=round(time.perf_counter() - began, 1))


def _show(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
