"""A run's clock and counts, arrivals, and the figures that are made of them, against numbers made by hand."""

from pathlib import Path

import numpy as np
import pytest

from jaxspec.bench.measure import Trace, poisson_arrivals, run_requests
from jaxspec.bench.record import AcceptanceFigures, Spread, Waits, figures, usd_per_million
from jaxspec.bench.rounds import held_at
from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams, SpeculationMetrics
from jaxspec.topology import PLAIN

ENGINE = {"max_model_len": 48, "prefill_buckets": (16,), "max_logprobs": 0, "steps_per_dispatch": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
PROMPTS = [[5, 6, 7, 5, 6], [9] * 6, [3, 4], [8, 7, 8, 7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, max_num_seqs=2, speculative_config=NGRAM, **ENGINE)


def test_trace_by_hand():
    trace = Trace(issued_s=1.0)
    for count, now in ((1, 1.5), (3, 1.7), (1, 2.5)):
        trace.arrive(count, now)
    assert trace.ttft_s == pytest.approx(0.5)
    assert trace.gaps_s == pytest.approx([0.2, 0.8])
    assert trace.latency_s == pytest.approx(1.5)
    assert trace.tpot_s == pytest.approx(1.0 / 4)
    assert Trace(tokens=1).tpot_s is None


def test_percentiles_by_hand():
    waits = Waits.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert waits is not None
    # Rank (n - 1) p: 2 of 0..4 is 3; 3.8 lies between 4 and 5, and so does 3.96.
    assert (waits.mean, waits.p50) == (3.0, 3.0)
    assert waits.p95 == pytest.approx(4.8)
    assert waits.p99 == pytest.approx(4.96)
    assert Waits.of([]) is None
    assert Spread.of([3.0, 1.0, 2.0, 9.0]) == Spread(2.5, 1.0, 9.0)
    # Of nine rounds the second on either side: chance leaves the median out of it in 4 % of all cases.
    assert Spread.of(range(9)) == Spread(4.0, 0.0, 8.0, 1.0, 7.0)


def test_acceptance_counts_passes_without_drafts():
    m = SpeculationMetrics(num_accepted_tokens_per_pos=[0, 0, 0])
    for drafted, committed in ((3, 4), (3, 1), (2, 2), (0, 1)):  # accepted 3, 0, 1, and a step without drafts
        m.add(drafted, committed)
    found = AcceptanceFigures.of(m)
    assert (found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens, found.num_steps) == (3, 8, 4, 4)
    assert found.rate == pytest.approx(4 / 8)
    assert found.length == m.mean_acceptance_length == pytest.approx(8 / 4)
    assert found.drafted_length == m.drafted_acceptance_length == pytest.approx(1 + 4 / 3)
    assert found.per_pos == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert found.mean_drafted == pytest.approx(8 / 4)


def test_cost_by_hand():
    assert usd_per_million(3.6, 1000.0) == pytest.approx(1.0)
    rounds = [[Trace(0.0, 1.0, 3.0, [2.0], 4)], [Trace(0.0, 2.0, 3.0, [1.0], 4)]]
    found = figures(rounds, [1000.0, 1000.0], [None, 50.0], 7.2)
    assert found.usd_per_million_tokens == pytest.approx(2.0)
    assert found.decode_tokens_per_s is None, "one round has no decode rate"
    assert (found.requests, found.tokens) == (1, 4)
    assert found.ttft_s is not None
    assert found.ttft_s.mean == pytest.approx(1.5)


def test_poisson_arrivals_are_seeded():
    first = poisson_arrivals(2000, 4.0, seed=1)
    assert first == poisson_arrivals(2000, 4.0, seed=1)
    assert first != poisson_arrivals(2000, 4.0, seed=2)
    gaps = np.diff(first)
    assert first[0] == 0
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.1), "an exponential law's deviation is its mean"
    with pytest.raises(ConfigError, match="rate above 0"):
        poisson_arrivals(3, 0.0, seed=1)


def test_closed_loop_run(llm: LLM):
    outputs = llm.generate(PROMPTS, GREEDY)
    run = run_requests(llm, PROMPTS, GREEDY)
    assert run.token_ids == [o.outputs[0].token_ids for o in outputs]
    assert run.drafted == [o.outputs[0].drafted for o in outputs]
    assert run.tokens == 4 * 9
    assert [trace.tokens for trace in run.traces] == [9] * 4
    assert 0 < run.decode_time_s <= run.time_s
    assert 0 < run.decode_tokens <= run.tokens
    ends = sorted(trace.last_s for trace in run.traces)
    issued = [trace.issued_s for trace in run.traces]
    assert issued[:2] == [0.0, 0.0], "two rows, so two requests are out at first"
    assert issued[2:] == ends[:2], "and each end sends the next"
    assert all(trace.ttft_s > 0 and len(trace.gaps_s) >= 1 for trace in run.traces)
    assert run.speculation.num_steps == sum(o.metrics.num_steps for o in outputs)
    assert set(run.lengths) == {"2"}


def test_plain_run_takes_no_drafts(llm: LLM):
    plain = run_requests(llm, PROMPTS, [SamplingParams(temperature=0.0, max_tokens=9, speculative=False)] * 4)
    assert set(plain.lengths) == {"0"}
    assert plain.speculation.num_draft_tokens == 0


def test_open_loop_waits_for_its_requests(llm: LLM):
    run = run_requests(llm, PROMPTS, GREEDY, [0.0, 0.0, 0.3, 0.31])
    assert [trace.issued_s for trace in run.traces] == [0.0, 0.0, 0.3, 0.31]
    assert all(trace.first_s > trace.issued_s for trace in run.traces)
    assert run.time_s > 0.31
    assert [len(ids) for ids in run.token_ids] == [9] * 4


def test_a_run_that_fails_leaves_the_engine_idle(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """What failed does not reach the next cell."""
    step, calls = llm.step, []

    def fails(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ConfigError("not today")
        return step(*args)

    monkeypatch.setattr(llm, "step", fails)
    with pytest.raises(ConfigError, match="not today"):
        run_requests(llm, PROMPTS, GREEDY)
    assert not llm.engine.busy
    assert [len(ids) for ids in run_requests(llm, PROMPTS, GREEDY).token_ids] == [9] * 4


def test_an_engine_is_held_at_one_topology_for_a_while(llm: LLM):
    control = llm.engine.control
    with held_at(llm, PLAIN):
        run = run_requests(llm, PROMPTS, GREEDY)
    assert set(run.lengths) == {"0"}
    assert llm.engine.control is control
