"""Compares plain with speculative decoding on one engine: what ``jaxspec demo`` measures."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from jaxspec.bench.draft_timer import draft_timer
from jaxspec.bench.measure import Run, run_requests
from jaxspec.bench.rounds import PLAIN, SPECULATIVE, run_rounds
from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams, SpeculationMetrics


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


def compare(
    llm: LLM,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    repetitions: int,
    show: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Measures greedy decoding of one prompt after another, or of all of them in an engine of several rows.

    Args:
      llm: with a drafter.
      prompts: texts, at least as many as the engine has rows.
      max_tokens: generated per prompt, end-of-text ids ignored.
      repetitions: measured rounds, after one that only warms up.
      show: called with (parts done, parts in all).

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
    drafted = replace(plain, speculative=None)
    size = 1 if batch == 1 else len(prompts)
    parts = [slice(first, first + size) for first in range(0, len(prompts), size)]
    done = count(1)

    def tick() -> None:
        if show:
            show(next(done), len(parts) * (repetitions + 1))

    subjects = {
        PLAIN: lambda part: run_requests(llm, prompts[part], plain),
        SPECULATIVE: lambda part: run_requests(llm, prompts[part], drafted),
    }
    time_drafting = draft_timer(llm, prompts[:batch], drafted)
    rounds, draft_times = [], []
    for runs in run_rounds(subjects, parts, repetitions, tick):
        rounds.append(runs)
        draft_times.append(time_drafting())
    return _summarize(batch, len(prompts), max_tokens, rounds, statistics.median(draft_times))


def _summarize(
    batch: int, prompts: int, max_tokens: int, rounds: list[list[dict[str, Run]]], draft_time_s: float
) -> Comparison:
    """Computes the figures from the runs of every round and part."""

    def over_rounds(figure: Callable[[list[Run]], float], mode: str) -> list[float]:
        return [figure([part[mode] for part in runs]) for runs in rounds]

    rates = {mode: over_rounds(_rate, mode) for mode in (PLAIN, SPECULATIVE)}
    times = {mode: over_rounds(lambda runs: sum(run.time_s for run in runs), mode) for mode in rates}
    step_s = {mode: batch * statistics.median(over_rounds(_row_step_time, mode)) for mode in rates}
    speedups = [s / p for s, p in zip(rates[SPECULATIVE], rates[PLAIN], strict=True)]
    per_part = [
        statistics.median(_rate([part[SPECULATIVE]]) / _rate([part[PLAIN]]) for part in same_prompts)
        for same_prompts in zip(*rounds, strict=True)
    ]
    speculation = SpeculationMetrics()
    for part in rounds[0]:
        speculation.merge(part[SPECULATIVE].speculation)
    steps = max(speculation.num_steps, 1)
    texts = [[part[mode].token_ids for part in runs] for runs in rounds for mode in (PLAIN, SPECULATIVE)]
    return Comparison(
        batch=batch,
        prompts=prompts,
        max_tokens=max_tokens,
        repetitions=len(rounds),
        plain_tok_per_s=statistics.median(rates[PLAIN]),
        spec_tok_per_s=statistics.median(rates[SPECULATIVE]),
        speedup=statistics.median(speedups),
        speedup_range=(min(speedups), max(speedups)),
        prompt_speedup_range=(min(per_part), max(per_part)),
        total_speedup=statistics.median(p / s for s, p in zip(times[SPECULATIVE], times[PLAIN], strict=True)),
        acceptance_length=speculation.mean_acceptance_length,
        acceptance_per_pos=[count / steps for count in speculation.num_accepted_tokens_per_pos],
        plain_step_time_s=step_s[PLAIN],
        spec_step_time_s=step_s[SPECULATIVE],
        draft_time_s=draft_time_s,
        draft_cost=draft_time_s / step_s[PLAIN],
        verify_ratio=(step_s[SPECULATIVE] - draft_time_s) / step_s[PLAIN],
        identical=all(text == texts[0] for text in texts),
    )


def _rate(runs: list[Run]) -> float:
    return sum(run.decode_tokens for run in runs) / sum(run.decode_time_s for run in runs)


def _row_step_time(runs: list[Run]) -> float:
    return sum(run.decode_time_s for run in runs) / max(sum(run.decode_steps for run in runs), 1)
