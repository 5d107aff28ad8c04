"""Section "correctness": on this card, kernels against float64 and their references, row invariance, losslessness."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.sharding.compiler_options import compiler_options
from lab.gpu import experts, float64
from lab.gpu.random_model import random_array, random_bits, random_quantized
from lab.gpu.report import Section
from lab.gpu.timing import side_by_side
from pallas_kernels.case import Case
from pallas_kernels.few_rows_dense.api import few_rows_dense
from pallas_kernels.few_rows_dense.cases import Sizes as DenseSizes
from pallas_kernels.quantized import Quantized
from pallas_kernels.routed_experts.api import routed_experts
from pallas_kernels.routed_experts.cases import Shape, gpt_oss
from pallas_kernels.select import SlowKernelWarning
from pallas_kernels.verify_attention.api import verify_attention
from pallas_kernels.weight_cases import abstract_weight

# Bfloat16 keeps 8 bits and sums are float32, so errors lie between 1e-3 and 1e-2 of the norm (2 ** -9 per factor).
BFLOAT16 = 1e-2
COMPARED = 2  # rows that the host computes


def correctness(section: Section) -> None:
    """Runs all checks, the cheap ones first."""
    kernel = "interpret" if section.tiny else "triton"
    for check in (_experts, _dense, _attention):
        with section.attempt(check.__doc__ or "") as go:
            if go:
                check(section, kernel)
    for quantization in ("fp8",) if section.tiny else ("none", "fp8"):
        with section.attempt(
            f"losslessness of the demo pair, {quantization}", needed_s=0 if section.tiny else 20
        ) as go:
            if go:
                lossless(section, quantization)
    references(section, kernel)


def _invariant(section: Section, name: str, run: Callable[..., Any], rows: list[Any], counts: tuple[int, ...]) -> Any:
    """Checks that a prefix of the rows, and the rows in another order, come out bitwise the same; returns all rows."""
    whole = np.asarray(run(*rows))
    for count in counts:
        same = np.array_equal(np.asarray(run(*(x[:count] for x in rows))), whole[:count])
        section.check(f"{name}: {count} of {len(whole)} rows are the same alone", passed=same, detail="bitwise")
    order = np.random.default_rng(0).permutation(len(whole))
    same = np.array_equal(np.asarray(run(*(x[order] for x in rows))), whole[order])
    section.check(f"{name}: {len(whole)} rows are the same in another order", passed=same, detail="bitwise")
    return whole


def _experts(section: Section, kernel: Any) -> None:
    """routed_experts by its rows, and near float64."""
    for name, shape in (experts.TINY if section.tiny else experts.REAL).items():
        check_experts(section, f"experts {name}", shape, kernel)


def check_experts(section: Section, title: str, shape: Shape, kernel: Any) -> None:
    """Checks that experts' rows do not depend on each other, and are near float64."""
    inputs = experts.random_inputs(replace(shape, layers=2))
    count = 3 if section.tiny else 64
    rows = list(inputs.rows(count)[0])
    how: dict[str, Any] = {"activation": shape.activation, "dtype": shape.dtype, "implementation": kernel}
    run = jax.jit(lambda x, ids, w, stack: routed_experts(x, ids, w, stack, layer=jnp.int32(1), **how))
    whole = _invariant(section, title, lambda *r: run(*r, inputs.stack), rows, _prefixes(count))
    exact = float64.routed_experts(
        rows[0], rows[1], rows[2], inputs.stack, 1, oss=shape.activation is gpt_oss, rows=COMPARED
    )
    _near(section, title, whole[:COMPARED], exact)


def _dense(section: Section, kernel: Any) -> None:
    """few_rows_dense by its rows, and near float64."""
    real = (DenseSizes(64, 2048, 5120, layers=2), DenseSizes(64, 1536, 24576, "fp8", layers=2))
    for sizes in (DenseSizes(3, 64, 48, layers=2),) if section.tiny else real:
        w: Any = abstract_weight(sizes.form, (sizes.layers,), (sizes.depth, sizes.columns), sizes.block)
        if isinstance(w, Quantized):
            w = Quantized(*random_quantized(w, w.format.kind, 0), w.format)
        else:
            w = random_array(0, w.shape, w.dtype)
        x = jnp.asarray(np.random.default_rng(1).standard_normal((sizes.rows, sizes.depth)), jnp.bfloat16)
        run = jax.jit(
            lambda x, w: few_rows_dense(x, w, dtype=jnp.dtype("bfloat16"), layer=jnp.int32(1), implementation=kernel)
        )
        name = f"dense {sizes.form} {sizes.depth}x{sizes.columns}"
        whole = _invariant(section, name, lambda x, run=run, w=w: run(x, w), [x], _prefixes(sizes.rows))
        _near(section, name, whole[:COMPARED], float64.few_rows_dense(x, w, 1, rows=COMPARED))


def _attention(section: Section, kernel: Any) -> None:
    """verify_attention by its rows, and near float64."""
    heads, kv_heads, width, context, block, rows = (4, 2, 16, 21, 8, 3) if section.tiny else (32, 4, 128, 1500, 128, 9)
    capacity = -(-(context + 8) // block) * block
    k, v = (random_bits(n, (rows, kv_heads, capacity, width)) for n in range(2))
    sinks = jnp.asarray(np.random.default_rng(5).standard_normal(heads), jnp.float32)
    q = jnp.asarray(np.random.default_rng(6).standard_normal((rows, 4, heads, width)) * 20, jnp.float32)
    start = np.linspace(context // 2, context, rows).astype(np.int32)
    position = jnp.asarray(start[:, None] + np.arange(4)[None], jnp.int32)
    run = jax.jit(
        lambda q, position, page: verify_attention(
            q, k, v, position, scale=width**-0.5, dtype=jnp.dtype("bfloat16"), sinks_H=sinks, block=block, row_B=page,
            implementation=kernel,
        )
    )  # fmt: skip
    pages = jnp.arange(rows, dtype=jnp.int32)
    whole = _invariant(section, "attention", run, [q, position, pages], () if section.tiny else (1,))
    alone = np.concatenate([np.asarray(run(q[:, t : t + 1], position[:, t : t + 1], pages)) for t in range(4)], axis=1)
    same = np.array_equal(alone, whole)
    section.check("attention: 4 positions are the same one by one", passed=same, detail="bitwise")
    keys, values = (np.asarray(x[0]).view(jnp.bfloat16).astype(np.float64) for x in (k, v))
    exact = float64.attention(np.asarray(q[0]), keys, values, np.asarray(position[0]), scale=width**-0.5, sinks_H=sinks)
    _near(section, "attention", whole[0], exact)


def _prefixes(count: int) -> tuple[int, ...]:
    return tuple(n for n in (1, 4, 17) if n < count)


def _near(section: Section, name: str, out: np.ndarray, exact: np.ndarray) -> None:
    far = float64.apart(out, exact)
    section.check(f"{name}: near float64", passed=far < BFLOAT16, detail=f"{far:.1e} of the norm")


def lossless(section: Section, quantization: str) -> None:
    """The demo target says the same with a draft model, with prompt lookup and without drafts, greedy and sampled.

    The tiny run takes the draft model as target, for which less is compiled.
    """
    count, tokens, k = (1, 6, 1) if section.tiny else (16, 64, 4)
    target = demo_model_dir("draft" if section.tiny else "target")
    excerpts = json.loads((target.parent / "held_out_prompts.json").read_text(encoding="utf-8"))
    prompts = [excerpt["prompt"] for excerpt in excerpts[:count]]
    drafters: dict[str, dict[str, Any]] = {"prompt lookup": {"method": "ngram", "num_speculative_tokens": k}}
    if not section.tiny:
        model = str(demo_model_dir("draft"))
        drafters["a draft model"] = {"method": "draft_model", "model": model, "num_speculative_tokens": k}
    for name, config in drafters.items():
        llm = LLM(
            target, speculative_config=config, dtype="bfloat16", quantization=quantization, max_num_seqs=count,
            max_model_len=512, max_logprobs=0, prefill_buckets=(256,),
        )  # fmt: skip
        said = [_texts(llm, prompts, tokens, speculative=speculative) for speculative in (None, False)]
        same = sum(a == b for a, b in zip(*said, strict=True))
        weights = "bfloat16" if quantization == "none" else quantization
        detail = f"{same} of {count} texts of {tokens} tokens are the same"
        section.check(f"demo pair, weights {weights}, {name}: lossless", passed=same == count, detail=detail)


def _texts(llm: LLM, prompts: list[str], tokens: int, *, speculative: bool | None) -> list[list[int]]:
    """Every other prompt sampled, each with a seed of its own."""
    params = [
        SamplingParams(temperature=0.7 * (n % 2), seed=n, max_tokens=tokens, ignore_eos=True, speculative=speculative)
        for n in range(len(prompts))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


def references(section: Section, kernel: Any) -> None:
    """Every case of every operation, found by discovery: the kernel equals the reference within its tolerance."""
    wanted = "tiny" if section.tiny else "real"
    operations = sorted(module.name for module in iter_modules(pallas_kernels.__path__) if module.ispkg)
    for op in operations:
        cases: list[Case] = [c for c in import_module(f"pallas_kernels.{op}.cases").CASES if c.size == wanted]
        for case in cases[: 1 if section.tiny else None]:
            name = f"{op} {case.name}"
            with section.attempt(name, needed_s=0 if section.tiny else 6) as go:
                if go:
                    check_case(section, name, case, kernel)


def check_case(section: Section, name: str, case: Case, kernel: Any) -> None:
    """Checks that a case comes out as its reference does."""
    arguments = case.random(jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowKernelWarning)
        made = side_by_side({how: partial(_compiled, case, how, arguments) for how in (kernel, "xla")})
    for how, program in made.items():
        if isinstance(program, Exception):
            section.check(f"{name}: {how} compiles", passed=False, detail=str(program)[:400])
            return
    outs, exacts = (jax.tree.leaves(made[how](*arguments)) for how in (kernel, "xla"))
    pairs = [
        (np.asarray(out, np.float64), np.asarray(exact, np.float64)) for out, exact in zip(outs, exacts, strict=True)
    ]
    far = max(float(np.max(np.abs(out - exact)) / np.max(np.abs(exact))) for out, exact in pairs)
    section.check(f"{name}: equals its reference", passed=far <= case.tolerance, detail=f"{far:.1e} of the largest")


def _compiled(case: Case, how: Any, arguments: tuple[Any, ...]) -> Any:
    return jax.jit(case.call(how)).lower(*arguments).compile(compiler_options())
