"""Compares plain with speculative decoding of the same prompts, one at a time: what ``jaxspec demo`` measures."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jaxspec.bench.measure import Run, run_requests
from jaxspec.bench.rounds import PLAIN, SPECULATIVE, run_in_turns
from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM, Prompt
from jaxspec.serve.request import SamplingParams, SpeculationMetrics

CONFIDENCE = 0.95
Pair = Mapping[str, Run]


@dataclass(frozen=True)
class Comparison:
    """Plain against speculative decoding of some prompts, each read and answered by itself.

    Attributes:
      name: of the kind of prompts.
      prompts, pairs: how many, and how often one was answered both ways.
      plain_tok_per_s, spec_tok_per_s: tokens per second with the prompt read, geometric mean over prompts.
      speedup: their ratio.
      speedup_interval: 95 % interval of it for other prompts of the kind, by Student's t over the logarithms of the
        prompts' ratios; None for a single prompt.
      acceptance_length: tokens per target pass, of all passes with speculation.
      drafted_acceptance_length: the same of the passes that had drafts.
      identical: whether both ways gave the same tokens, every time.
    """

    name: str
    prompts: int
    pairs: int
    plain_tok_per_s: float
    spec_tok_per_s: float
    speedup: float
    speedup_interval: tuple[float, float] | None
    acceptance_length: float
    drafted_acceptance_length: float
    identical: bool

    @classmethod
    def of(cls, name: str, answered: Sequence[Sequence[Pair]]) -> "Comparison":
        """Computes the figures.

        Args:
          name: of the kind of prompts.
          answered: for each prompt its pairs of runs.
        """
        speculation, rates = SpeculationMetrics(), {PLAIN: [], SPECULATIVE: []}
        for pairs in answered:
            for way, logs in rates.items():
                logs.append(math.log(sum(p[way].tokens for p in pairs) / sum(p[way].time_s for p in pairs)))
            for pair in pairs:
                speculation.merge(pair[SPECULATIVE].speculation)
        plain, spec = (float(np.mean(rates[way])) for way in (PLAIN, SPECULATIVE))
        ratios = np.subtract(rates[SPECULATIVE], rates[PLAIN])
        texts = [[run.token_ids for pair in pairs for run in pair.values()] for pairs in answered]
        return cls(
            name=name,
            prompts=len(answered),
            pairs=sum(map(len, answered)),
            plain_tok_per_s=math.exp(plain),
            spec_tok_per_s=math.exp(spec),
            speedup=math.exp(spec - plain),
            speedup_interval=_interval(ratios),
            acceptance_length=speculation.mean_acceptance_length,
            drafted_acceptance_length=speculation.drafted_acceptance_length,
            identical=all(text == same[0] for same in texts for text in same),
        )


def _interval(logs: np.ndarray) -> tuple[float, float] | None:
    if len(logs) < 2:
        return None
    from scipy import stats  # takes a second

    wide = stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    return math.exp(logs.mean() - wide), math.exp(logs.mean() + wide)


def compare(
    plain: LLM,
    speculative: LLM,
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    max_tokens: int,
    time_s: float,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> list[Comparison]:
    """Answers prompts greedily both ways, in turns, again and again until the time is up, but each of them once.

    Args:
      plain: an engine of one row without a drafter.
      speculative: one with a drafter, of the same model.
      prompts: by kind.
      max_tokens: most tokens of an answer.
      time_s: begins no other turn after it.
      show: called with (prompts answered, prompts in all) in the first turn.

    Raises:
      ConfigError: a kind has no prompts.
    """
    if empty := [name for name, some in prompts.items() if not some]:
        raise ConfigError(f"compare: no prompts of {empty}")
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    every = [(name, index) for name, some in prompts.items() for index in range(len(some))]
    every.sort(key=lambda place: place[1])  # kinds take turns, so that all know the same moods of the machine
    pairs: dict[tuple[str, int], list[Pair]] = {place: [] for place in every}
    began, turn = time.monotonic(), 0
    while turn == 0 or time.monotonic() - began < time_s:
        for number, (name, index) in enumerate(every):
            if turn and time.monotonic() - began > time_s:
                break
            prompt = prompts[name][index]
            ways = {PLAIN: plain, SPECULATIVE: speculative}
            runs = {way: partial(run_requests, llm, [prompt], params) for way, llm in ways.items()}
            pairs[name, index].append(run_in_turns(runs, turn + number))
            show(min(number + 1 + turn * len(every), len(every)), len(every))
        turn += 1
    return [Comparison.of(name, [pairs[name, i] for i in range(len(some))]) for name, some in prompts.items()]
