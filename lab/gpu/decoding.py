"""Section "decoding": steps of real architectures with random weights, plain and verifying, against the byte bound."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.aot import hlo
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.state import DecodeState, Target, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.inspect.model_cost import model_cost
from jaxspec.nn.policy import make_policy
from jaxspec.perf.cost import ModelCost
from jaxspec.perf.moesd import speedup
from jaxspec.protocol import NoDrafts
from jaxspec.pytree import replace
from jaxspec.sharding.compiler_options import compiler_options
from lab.gpu.acceptance import PUBLISHED, Guesses
from lab.gpu.ceilings import copy_bytes_per_s
from lab.gpu.random_model import published_config, random_array, random_bits, random_target
from lab.gpu.report import Section
from lab.gpu.timing import Subject, Timing, interleaved, side_by_side

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b", "qwen2-57b-a14b")
SLACK = 8
MANY = 1 << 20  # positions that touch every expert
SILENT = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "while", "conditional", "call", "copy-done", "async-done",
})  # fmt: skip
Cell = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      waves: rows and drafts that are measured together, the most telling ones first.
      context: positions in the cache.
      steps: of a long dispatch.
      rounds: of every timing.
      kernels: of the policy.
      block: positions that attention reads at a time.
    """

    waves: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    context: int
    steps: int
    rounds: int
    kernels: Any
    block: int


WAVES = (
    ((1, 8), (0, 3)),
    ((1, 8, 32, 128), (0, 1, 3, 7)),
    ((2, 4, 16, 64), (0, 1, 3, 7)),
    ((1, 2, 4, 8, 16, 32, 64, 128), (2, 4, 5, 6)),
)
REAL = Sizes(WAVES, context=1024, steps=8, rounds=5, kernels="triton", block=128)
TINY = Sizes((((1,), (0, 1)),), context=40, steps=2, rounds=1, kernels="interpret", block=16)


@dataclass(frozen=True)
class Model:
    """One architecture under measurement.

    Attributes:
      name: of its config.
      target: with random weights.
      cost: what a pass reads.
      sizes: what is measured.
    """

    name: str
    target: Target
    cost: ModelCost
    sizes: Sizes

    def drafter(self, k: int) -> Any:
        """K guesses that cost nothing."""
        return Guesses(k, self.cost.vocab_size) if k else NoDrafts()

    def empty(self, rows: int) -> DecodeState:
        """Returns rows with room for a few dispatches after the context."""
        return init_state(self.target, NoDrafts(), rows, self.sizes.context + 4 * self.sizes.steps, slack=SLACK)

    def cached_bytes(self, rows: int) -> float:
        """Caches of so many rows."""
        state = jax.eval_shape(lambda: self.empty(rows))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state.layers))

    def read_bytes(self, rows: int, positions: int) -> float:
        """Weights and caches that a pass reads at least, experts by their union if routing is uniform."""
        cached = sum(
            layer.count * cache.entry_bytes * cache.entries(positions, self.sizes.context)
            for layer in self.cost.layers
            for cache in layer.caches
        )
        return self.cost.weight_bytes(rows, positions) + rows * cached


def free_bytes() -> float:
    """Bytes of this card that nothing occupies; endless where JAX does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else math.inf


def decoding(section: Section, name: str, sizes: Sizes | None = None, watch: "Watch | None" = None) -> None:
    """Measures one architecture.

    A plain step is one token per row. A verifying step with K drafts commits one token too, because its drafts are
    guesses: its time over the plain step's is the verify cost ratio (the inverse of MoESD's target efficiency), and a
    published acceptance length over that ratio is the speed-up with drafts that cost nothing.

    Args:
      section: that cells are added to.
      name: of the architecture, a file of ``configs/models``.
      sizes: what is measured.
      watch: called with the rows and their programs by number of drafts once these are measured.
    """
    sizes = sizes or (TINY if section.tiny else REAL)
    config = published_config(name, tiny=section.tiny)
    copy_bytes_per_s(tiny=section.tiny)  # before the weights fill the card
    cost, room = model_cost(config, name=name), free_bytes()
    if (needed := cost.weight_bytes(1, MANY)) > room:
        section.skip(name, f"weights of {needed / 1e9:.0f} GB do not fit into {room / 1e9:.0f} GB")
        return
    target = random_target(config, make_policy(depth="stacked", kernels=sizes.kernels), block=sizes.block)
    model = Model(name, target, cost, sizes)
    section.add("weights", model=name, bytes=sum(x.nbytes for x in jax.tree.leaves(target)))
    done: set[Cell] = set()
    took_s, plain = 0.0, {}
    for rows, drafts in sizes.waves:
        wave = [cell for cell in ((b, k) for b in rows for k in drafts) if cell not in done]
        what = f"{name}: {len(wave)} cells of rows {rows} and drafts {drafts}"
        before = section.left_s
        with section.attempt(what, needed_s=1.3 * took_s * len(wave) / max(len(done), 1)) as go:
            if go:
                _measure_wave(section, model, wave, plain, watch)
                done |= set(wave)
        took_s += before - section.left_s


def _measure_wave(
    section: Section, model: Model, wave: list[Cell], plain: dict[int, float], watch: "Watch | None"
) -> None:
    compiled, steps = compile_cells(model, wave), model.sizes.steps
    for (rows, k), program in compiled.items():
        if isinstance(program, Exception):
            section.check(f"{model.name}: {rows} rows, {k} drafts compile", passed=False, detail=str(program)[:600])
    programs = {cell: program for cell, program in compiled.items() if not isinstance(program, Exception)}
    for rows in dict.fromkeys(b for b, _ in programs):
        if (needed := model.cached_bytes(rows)) > (room := free_bytes()):
            section.skip(f"{model.name}: {rows} rows", f"caches of {needed / 1e9:.1f} GB, {room / 1e9:.1f} GB are free")
            continue
        drafts = [k for b, k in programs if b == rows]
        with section.attempt(f"{model.name}: {rows} rows") as go:
            if not go:
                continue
            runner = Runner(model, rows)
            _check_lossless(section, runner, {k: programs[rows, k] for k in drafts})
            times = runner.time({k: programs[rows, k] for k in drafts})
            for k in drafts:
                one, many = times[f"{k} drafts, 1 steps"], times[f"{k} drafts, {steps} steps"]
                step_s = max(many.median_s - one.median_s, 1e-9) / (steps - 1)
                if k == 0:
                    plain[rows] = step_s
                _add_cell(section, model, (rows, k), step_s, one, plain.get(rows), programs[rows, k])
            if watch:
                watch(runner, {k: programs[rows, k] for k in drafts})


def _add_cell(
    section: Section, model: Model, cell: Cell, step_s: float, one: Timing, plain_s: float | None, program: Any
) -> None:
    rows, k = cell
    read = model.read_bytes(rows, k + 1)
    bound_s = read / copy_bytes_per_s(tiny=section.tiny)
    ratio = None if plain_s is None else step_s / plain_s
    section.add(
        "cells", model=model.name, rows=rows, drafts=k, context=model.sizes.context, step_s=step_s, read_bytes=read,
        bound_s=bound_s, fraction_of_bound=bound_s / step_s, plain_tok_per_s=rows / step_s if k == 0 else None,
        verify_ratio=ratio, byte_ratio=read / model.read_bytes(rows, 1), dispatch_of_one_step_s=one.median_s,
        host_s=max(one.median_s - step_s, 0.0), launches_per_step=launches_per_step(program.as_text()),
    )  # fmt: skip
    for known in PUBLISHED.get(model.name, ()):
        if known.drafts == k and ratio is not None:
            gain = speedup(acceptance_length=known.length, verify_ratio=ratio)
            section.add(
                "speedups", model=model.name, rows=rows, drafts=k, acceptance_length=known.length, source=known.source,
                speedup_with_free_drafts=gain, break_even_length=ratio,
            )  # fmt: skip


def launches_per_step(text: str) -> int:
    """Instructions of an optimized dispatch that start something on the device in every step.

    Branches that need not be taken and loops whose length depends on the data are left out.
    """
    return sum(
        run.times
        for instruction, run in hlo.parse(text, stepped=True).executed()
        if instruction.opcode not in SILENT and not (run.setup or run.optional or run.looped)
    )


def compile_cells(model: Model, cells: Iterable[Cell]) -> dict[Cell, Any]:
    """A dispatch program per cell, compiled side by side, for compiling takes longer than measuring."""

    def compile_one(cell: Cell) -> Any:
        rows, k = cell
        state = jax.eval_shape(lambda: model.empty(rows))
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.target)
        scalars = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
        run = partial(dispatch, plan=StepPlan(steps=model.sizes.steps))
        return (
            jax.jit(run, donate_argnums=2).lower(target, model.drafter(k), state, *scalars).compile(compiler_options())
        )

    return side_by_side({cell: partial(compile_one, cell) for cell in cells})


class Runner:
    """Rows in the middle of a text, which any program of their cell can continue from.

    Attributes:
      state: handed from program to program; donated each time.
    """

    def __init__(self, model: Model, rows: int):
        self.model, self.sizes, self.rows = model, model.sizes, rows
        state = model.empty(rows)
        layers = [{name: _fill(x, n) for name, x in cache.items()} for n, cache in enumerate(state.layers)]
        far = jnp.full(rows, 1 << 30, jnp.int32)
        sampling = replace(state.sampling, max_length_B=far, draft_limit_B=jnp.full(rows, SLACK, jnp.int32))
        self.state = replace(state, layers=tuple(layers), sampling=sampling, active_B=jnp.ones(rows, bool))

    def run(self, program: Any, k: int, steps: int) -> Any:
        """Starts a dispatch from the first position; returns its report without waiting."""
        anchor_B = jnp.arange(self.rows, dtype=jnp.int32) * 37 % self.model.cost.vocab_size
        state = replace(self.state, length_B=jnp.full(self.rows, self.sizes.context, jnp.int32), anchor_B=anchor_B)
        model = self.model
        self.state, report = program(model.target, model.drafter(k), state, np.int32(steps), np.bool_(False))
        return report.packed_BXW

    def text(self, program: Any, k: int) -> np.ndarray:
        """Returns what every row says next, one token per step at least."""
        self.run(program, k, self.sizes.steps)
        first = self.sizes.context + 1
        return np.asarray(self.state.history_BS)[:, first : first + self.sizes.steps]

    def time(self, programs: dict[int, Any]) -> dict[str, Timing]:
        """Times a short and a long dispatch of each program in turns."""
        subjects = [
            Subject(f"{k} drafts, {n} steps", partial(self.run, program, k, n))
            for k, program in programs.items()
            for n in (1, self.sizes.steps)
        ]
        return interleaved(subjects, rounds=self.sizes.rounds, round_s=0.0)


def _fill(x: jax.Array, seed: int) -> jax.Array:
    """Random numbers in the place of an empty cache, which would not fit twice beside the weights."""
    x.delete()
    return random_bits(seed, x.shape) if x.dtype == jnp.uint16 else random_array(seed, x.shape, x.dtype)


Watch = Callable[[Runner, dict[int, Any]], None]


def _check_lossless(section: Section, runner: Runner, programs: dict[int, Any]) -> None:
    if 0 not in programs:
        return
    plain = runner.text(programs[0], 0)
    for k, program in programs.items():
        if k:
            same = runner.text(program, k) == plain
            detail = f"{int(same.all(axis=1).sum())} of {runner.rows} rows say the same {plain.shape[1]} tokens"
            name = f"{runner.model.name}: {runner.rows} rows, {k} drafts are lossless"
            section.check(name, passed=bool(same.all()), detail=detail)
