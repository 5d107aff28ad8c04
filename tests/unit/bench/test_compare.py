"""Figures of two ways of decoding, from runs whose times are known."""

import math

import pytest

from jaxspec.bench.compare import Comparison
from jaxspec.bench.measure import Run
from jaxspec.bench.rounds import PLAIN, SPECULATIVE
from jaxspec.serve.request import SpeculationMetrics


def run(ids: list[int], time_s: float, accepted: int = 0, drafted: int = 0) -> Run:
    metrics = SpeculationMetrics(num_steps=len(ids) - accepted, num_drafts=drafted, num_accepted_tokens=accepted)
    return Run([ids], [[]], len(ids), time_s, 0, 0.0, 0, metrics, [], {})


def pair(plain_s: float, spec_s: float, other: bool = False) -> dict[str, Run]:
    ids = [1, 2, 3, 4]
    return {PLAIN: run(ids, plain_s), SPECULATIVE: run([9, *ids[1:]] if other else ids, spec_s, 2, 1)}


def test_every_prompt_counts_alike():
    """Two prompts, 2 and 8 times as fast, the first of them measured twice: 4 times on average."""
    result = Comparison.of("chat", [[pair(1.0, 0.5), pair(3.0, 1.5)], [pair(8.0, 1.0)]])
    assert result.speedup == pytest.approx(4)
    assert (result.plain_tok_per_s, result.spec_tok_per_s) == (pytest.approx(1), pytest.approx(4))
    assert (result.prompts, result.pairs, result.identical) == (2, 3, True)
    assert (result.acceptance_length, result.drafted_acceptance_length) == (2.0, 3.0)
    half = 12.7062 * math.log(2)  # of Student's t with one degree of freedom; both lie log 2 from their mean
    assert result.speedup_interval == (pytest.approx(4 / math.exp(half), 1e-4), pytest.approx(4 * math.exp(half), 1e-4))


def test_one_prompt_has_no_interval_and_another_text_is_seen():
    result = Comparison.of("chat", [[pair(1.0, 0.5), pair(1.0, 0.5, other=True)]])
    assert result.speedup_interval is None
    assert not result.identical
