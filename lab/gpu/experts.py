"""Section "experts": routed experts of real shapes at decode sizes, as a share of the copy bandwidth, beside peers."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.gpu.ceilings import copy_bytes_per_s
from lab.gpu.ragged import Dot, by_ragged_dot, tokamax_dot, xla_dot
from lab.gpu.random_model import random_array, random_quantized
from lab.gpu.report import Section
from lab.gpu.timing import Subject, chained, interleaved, side_by_side
from pallas_kernels.quantized import Quantized
from pallas_kernels.routed_experts.api import routed_experts
from pallas_kernels.routed_experts.cases import Shape, gpt_oss

OWN = "jaxspec"
AGREE = 2e-2  # of the largest entry: both round hidden units to bfloat16, from sums in different orders
REAL = {
    "qwen3-30b-a3b": Shape(1, 128, 8, 2048, 768, "bfloat16"),
    "gpt-oss-120b": Shape(1, 128, 4, 2880, 2880, "mxfp4", bias=True, activation=gpt_oss),
    "mixtral-8x7b": Shape(1, 8, 2, 4096, 14336, "bfloat16"),
    "gpt-oss-20b": Shape(1, 32, 4, 2880, 2880, "mxfp4", bias=True, activation=gpt_oss),
    "qwen2-57b-a14b": Shape(1, 64, 8, 3584, 2560, "bfloat16"),
    "deepseek-v3 on one of 8": Shape(1, 32, 8, 7168, 2048, "fp8", chosen=256),
}
TINY = {"plain": Shape(1, 4, 2, 64, 32, "bfloat16")}
WAVES = {False: ((1, 8, 64, 256), (2048,), (2, 4, 6, 16, 32, 128)), True: ((3,),)}


@dataclass(frozen=True)
class Inputs:
    """One shape's weights, and rows for every call of a program.

    Attributes:
      shape: with as many layers as there are calls; every call reads another layer.
      stack: the kernel's weights, all layers one after another.
      layers: the same per layer, where they are plain; for peers that take no stack.
    """

    shape: Shape
    stack: dict[str, Any]
    layers: list[dict[str, Any]]

    def rows(self, count: int) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """Rows, choices and combine weights of each call; choices are uniform and without repetition."""
        s, rng = self.shape, np.random.default_rng(count)
        made = []
        for _ in range(s.layers):
            score = rng.random((count, s.chosen or s.experts))
            choice = np.argsort(score, axis=1)[:, : s.top_k].astype(np.int32)
            weight = rng.dirichlet(np.ones(s.top_k), count).astype(np.float32)
            x = rng.standard_normal((count, s.width)).astype(s.dtype)
            made.append((jnp.asarray(x), jnp.asarray(choice), jnp.asarray(weight)))
        return made

    def read_bytes(self, rows: list[tuple[jax.Array, jax.Array, jax.Array]]) -> float:
        """Bytes of the union of experts that a call touches, on average."""
        each = sum(leaf.nbytes for leaf in jax.tree.leaves(self.stack)) / (self.shape.layers * self.shape.experts)
        ids = [np.unique(np.asarray(choice)) for _, choice, _ in rows]
        return float(np.mean([(chosen < self.shape.experts).sum() for chosen in ids])) * each


def experts(section: Section) -> None:
    """Measures every shape at every number of rows, all implementations in turns."""
    shapes, calls = (TINY, 1) if section.tiny else (REAL, 8)
    if not section.tiny:
        for name, reason in missing_peers().items():
            section.skip(name, reason)
    for number, (name, shape) in enumerate(shapes.items()):
        share_s = section.left_s / (len(shapes) - number)
        with section.attempt(name, needed_s=0 if section.tiny else 10) as go:
            if go:
                until_s = section.left_s - share_s
                inputs = random_inputs(replace(shape, layers=calls))
                for rows in WAVES[section.tiny]:
                    if section.left_s > until_s:
                        measure(section, name, inputs, rows, partial(_programs, section))
                    else:
                        section.skip(f"{name}: {rows} rows", "no time: this shape's share of the budget is spent")


def missing_peers() -> dict[str, str]:
    """Returns why peers cannot be measured here."""
    missing = {}
    for name, module in (("tokamax", "tokamax"), ("torch and triton", "lab.gpu.torch_experts")):
        try:
            import_module(module)
        except Exception as error:
            missing[name] = f"not importable: {type(error).__name__}: {error}"
    return missing


def random_inputs(shape: Shape) -> Inputs:
    """Random weights of a shape on the device."""
    stack = {}
    for number, (name, like) in enumerate(shape.abstract()[3].items()):
        if isinstance(like, Quantized):
            stack[name] = Quantized(*random_quantized(like, like.format.kind, number), like.format)
        else:
            stack[name] = random_array(number, like.shape, like.dtype)
    plain = not any(isinstance(w, Quantized) for w in stack.values())
    layers = [{name: w[y] for name, w in stack.items()} for y in range(shape.layers)] if plain else []
    return Inputs(shape, stack, layers)


def _programs(section: Section, inputs: Inputs, rows: list[Any]) -> dict[str, Callable[[], Callable[[], Any]]]:
    """For each JAX implementation a function that compiles it and returns what launches it."""
    s = inputs.shape
    jobs = {OWN: by_kernel("interpret" if section.tiny else "triton", inputs, rows)}
    if not inputs.layers:
        return jobs
    peers: dict[str, Dot] = {"ragged_dot": xla_dot}
    if not section.tiny:
        with suppress(ImportError):
            peers["tokamax"] = tokamax_dot()
    each = [(*r, w["gate_up_ED2F"], w["down_EFD"]) for r, w in zip(rows, inputs.layers, strict=True)]
    return jobs | {name: partial(chained, by_ragged_dot(dot, s.activation), each) for name, dot in peers.items()}


def by_kernel(kernel: Any, inputs: Inputs, rows: list[Any]) -> Callable[[], Callable[[], Any]]:
    """Returns what compiles ours."""
    s = inputs.shape

    def own(x: Any, choice: Any, weight: Any, layer: Any, weights: Any) -> jax.Array:
        run = partial(routed_experts, activation=s.activation, dtype=s.dtype, implementation=kernel)
        return run(x, choice, weight, weights, layer=layer)

    return partial(chained, own, [(*r, jnp.int32(y), inputs.stack) for y, r in enumerate(rows)])


def _torch_subject(inputs: Inputs, rows: list[Any]) -> tuple[Subject, Any]:
    """The Triton implementation as a CUDA graph of all calls, and its first result."""
    there: Any = import_module("lab.gpu.torch_experts")
    names = {
        "gate_up_ED2F": "gate_up",
        "down_EFD": "down",
        "gate_up_bias_E2F": "gate_up_bias",
        "down_bias_ED": "down_bias",
    }
    stack = {}
    for name, w in inputs.stack.items():
        stack[names[name]] = there.from_jax(w.data if isinstance(w, Quantized) else w)
        if isinstance(w, Quantized):
            stack[f"{names[name]}_scale"] = there.from_jax(w.scale)
    oss, calls = inputs.shape.activation is gpt_oss, []
    for y, row in enumerate(rows):
        weights = {name: w[y] for name, w in stack.items()}
        calls.append(partial(there.routed_experts, *map(there.from_jax, row), weights, oss=oss))
    replay, outs = there.captured(calls)
    replay()
    there.wait()
    return Subject("torch and triton", replay, len(rows), there.wait), np.asarray(outs[0].cpu())


def measure(
    section: Section, model: str, inputs: Inputs, sizes: tuple[int, ...], programs: Callable[[Inputs, list[Any]], Any],
    *, with_torch: bool = True,
) -> None:  # fmt: skip
    """Measures all implementations at several numbers of rows; programs are compiled side by side."""
    rows = {count: inputs.rows(count) for count in sizes}
    jobs = {(c, name): job for c in sizes for name, job in programs(inputs, rows[c]).items()}
    done = side_by_side(jobs)
    for count in sizes:
        with section.attempt(f"{model}: {count} rows") as go:
            if not go:
                continue
            subjects, results = [], {}
            for name in (n for c, n in jobs if c == count):
                launch = done[count, name]
                if isinstance(launch, Exception):
                    section.skip(f"{model}: {count} rows by {name}", f"does not compile: {str(launch)[:300]}")
                    continue
                subjects.append(Subject(name, launch, len(rows[count])))
                results[name] = np.asarray(launch()[0], np.float32)
            if with_torch and not section.tiny and inputs.shape.form in ("bfloat16", "mxfp4"):
                try:
                    subject, results["torch and triton"] = _torch_subject(inputs, rows[count])
                    subjects.append(subject)
                except Exception as error:
                    section.skip(f"{model}: {count} rows by torch and triton", str(error)[:300])
            _report(section, model, count, inputs, rows[count], subjects, results)


def _report(
    section: Section, model: str, count: int, inputs: Inputs, rows: list[Any], subjects: list[Subject],
    results: Mapping[str, np.ndarray],
) -> None:  # fmt: skip
    own = results.get(OWN)
    runs = f"{model}: {count} rows: {OWN} runs"
    section.check(runs, passed=own is not None, detail="the kernel compiles and returns")
    for name, other in results.items():
        if own is not None and name != OWN:
            apart = float(np.max(np.abs(own - other)) / np.max(np.abs(own)))
            section.check(
                f"{model}: {count} rows: {OWN} and {name} agree",
                passed=apart < AGREE,
                detail=f"{apart:.1e} of the largest",
            )
    tiny, read = section.tiny, inputs.read_bytes(rows)
    for name, timing in interleaved(subjects, rounds=2 if tiny else 7, round_s=0.0 if tiny else 0.01).items():
        section.add(
            "calls", model=model, form=inputs.shape.form, rows=count, implementation=name, time_s=timing.median_s,
            least_s=timing.least_s, most_s=timing.most_s, read_bytes=read, bytes_per_s=read / timing.median_s,
            share_of_copy=read / timing.median_s / copy_bytes_per_s(tiny=tiny),
        )  # fmt: skip
