"""Measures plain against speculative decoding in interleaved runs of one engine."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.bench.measure import Run, running
from jaxspec.bench.turns import in_turns
from jaxspec.errors import ConfigError
from jaxspec.protocol import Anchor, Drafter, DraftState
from jaxspec.pytree import replace as with_leaves
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams, SpeculationMetrics
from jaxspec.shapes import Array

PROPOSALS = 16  # drafted per timed call, so that starting the program does not count


@dataclass(frozen=True)
class Comparison:
    """Plain against speculative decoding of the same prompts.

    Rates and times are medians over repetitions of totals over prompts. "Plain step" is one target pass over
    one token per row, as plain decoding makes it.

    Attributes:
      batch: rows decoded together.
      prompts, max_tokens, repetitions: how much was run.
      plain_tok_per_s, spec_tok_per_s: tokens per second while every row decodes and no prompt is read.
      speedup, speedup_range: median, least and greatest of the paired ratios of the repetitions.
      prompt_speedup_range: least and greatest median speed-up of a prompt, where each is run by itself.
      total_speedup: the median ratio of whole runs: prompts are read, and rows run empty at the end.
      acceptance_length: tokens committed per row and verification, the target's own included.
      acceptance_per_pos: share of verifications whose accepted prefix covers each draft position.
      plain_step_time_s, spec_step_time_s, draft_time_s: of a step, and of drafting in it.
      draft_cost: drafting over a plain step.
      verify_ratio: a speculative step without the drafting over a plain step.
      identical: whether every run of a prompt gave the same tokens.
    """

    batch: int
    prompts: int
    max_tokens: int
    repetitions: int
    plain_tok_per_s: float
    spec_tok_per_s: float
    speedup: float
    speedup_range: tuple[float, float]
    prompt_speedup_range: tuple[float, float]
    total_speedup: float
    acceptance_length: float
    acceptance_per_pos: list[float]
    plain_step_time_s: float
    spec_step_time_s: float
    draft_time_s: float
    draft_cost: float
    verify_ratio: float
    identical: bool


def draft_timer(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> Callable[[], float]:
    """A function that times one proposal of all rows, on the state behind the prompts."""
    for prompt in prompts:
        llm.submit(prompt, params)
    for _ in range(2):
        llm.step(1)
    held = jax.tree.map(jnp.copy, (llm.engine.state.draft, llm.engine.state.anchor))
    llm.abort()
    program = jax.jit(propose_often, static_argnums=3).lower(llm.engine.drafter, *held, llm.spec.rule.name).compile()

    def measure() -> float:
        began = time.perf_counter()
        jax.block_until_ready(program(llm.engine.drafter, *held))
        return (time.perf_counter() - began) / PROPOSALS

    measure()
    return measure


def propose_often(drafter: Drafter, draft: DraftState, anchor: Anchor, rule: str) -> Array:
    """``PROPOSALS`` proposals one after the other, to be compiled and timed."""

    def one(_: Array, carry: tuple[DraftState, Array]):
        draft, token_B = carry
        # Each proposal starts from the one before, or XLA would draft once and reuse it.
        moved = with_leaves(anchor, token_B=token_B, length_B=anchor.length_B - (token_B & 1))
        proposal, draft = drafter.propose(draft, moved, rule)
        return draft, jnp.sum(proposal.token_BN, axis=1, dtype=jnp.int32) % 2

    return lax.fori_loop(0, PROPOSALS, one, (draft, anchor.token_B))[1]


def compare(
    llm: LLM,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    repetitions: int,
    show: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Measures greedy decoding, one prompt after the other, or all of them in an engine of several rows.

    Each repetition runs the same prompts plainly and speculatively, one right after the other, in turns.

    Args:
      llm: with a drafter.
      prompts: texts, at least as many as the engine has rows.
      max_tokens: generated per prompt, end-of-text ids ignored.
      repetitions: measured rounds, behind one that only warms up.
      show: called with (runs done, runs in all).

    Raises:
      ConfigError: the numbers leave nothing to measure.
    """
    batch, depth = llm.spec.rows, llm.engine.depth
    if len(prompts) < batch or repetitions < 1 or depth < 1 or max_tokens < 2 * (depth + 1):
        raise ConfigError(
            f"compare: needs {batch} prompts, drafts, repetitions and {2 * (depth + 1)} tokens each; "
            f"got {len(prompts)} prompts, {depth} drafts, {repetitions} repetitions, {max_tokens} tokens"
        )
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculative=False)
    modes = {False: plain, True: replace(plain, speculative=None)}
    groups = [[prompt] for prompt in prompts] if batch == 1 else [list(prompts)]
    total = 2 * len(groups) * (repetitions + 1)
    draft_time = draft_timer(llm, prompts[:batch], modes[True])
    rounds: list[list[dict[bool, Run]]] = []
    draft_times: list[float] = []
    for repetition in range(repetitions + 1):
        rounds.append([])
        for number, group in enumerate(groups):
            subjects = {mode: partial(running, llm, group, params) for mode, params in modes.items()}
            rounds[-1].append(in_turns(subjects, repetition + number + 1))
            if show:
                show(2 * (repetition * len(groups) + number + 1), total)
        draft_times.append(draft_time())
    return _summarize(batch, len(prompts), max_tokens, rounds, statistics.median(draft_times[1:]))


def _summarize(
    batch: int, prompts: int, max_tokens: int, rounds: list[list[dict[bool, Run]]], draft_time_s: float
) -> Comparison:
    warm = rounds[1:]
    rates = [{mode: _rate([pair[mode] for pair in pairs]) for mode in (False, True)} for pairs in warm]
    speedups = [rate[True] / rate[False] for rate in rates]
    per_group = [
        statistics.median(_rate([pairs[g][True]]) / _rate([pairs[g][False]]) for pairs in warm)
        for g in range(len(warm[0]))
    ]
    whole = [sum(p[False].time_s for p in pairs) / sum(p[True].time_s for p in pairs) for pairs in warm]
    step_s = {
        mode: batch * statistics.median(_row_step_time([p[mode] for p in pairs]) for pairs in warm)
        for mode in (False, True)
    }
    speculation = SpeculationMetrics()
    for pair in warm[0]:
        speculation.merge(pair[True].speculation)
    steps = max(speculation.num_steps, 1)
    same = all(
        run.token_ids == rounds[0][g][False].token_ids
        for pairs in rounds
        for g, p in enumerate(pairs)
        for run in p.values()
    )
    return Comparison(
        batch=batch,
        prompts=prompts,
        max_tokens=max_tokens,
        repetitions=len(warm),
        plain_tok_per_s=statistics.median(rate[False] for rate in rates),
        spec_tok_per_s=statistics.median(rate[True] for rate in rates),
        speedup=statistics.median(speedups),
        speedup_range=(min(speedups), max(speedups)),
        prompt_speedup_range=(min(per_group), max(per_group)),
        total_speedup=statistics.median(whole),
        acceptance_length=1 + speculation.num_accepted_tokens / steps,
        acceptance_per_pos=[count / steps for count in speculation.num_accepted_tokens_per_pos],
        plain_step_time_s=step_s[False],
        spec_step_time_s=step_s[True],
        draft_time_s=draft_time_s,
        draft_cost=draft_time_s / step_s[False],
        verify_ratio=(step_s[True] - draft_time_s) / step_s[False],
        identical=same,
    )


def _rate(runs: list[Run]) -> float:
    return sum(run.decode_tokens for run in runs) / sum(run.decode_time_s for run in runs)


def _row_step_time(runs: list[Run]) -> float:
    return sum(run.decode_time_s for run in runs) / max(sum(run.decode_steps for run in runs), 1)
