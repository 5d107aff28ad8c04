"""``auto`` against every fixed topology: the figures by hand, who still has turns, and a real engine."""

from pathlib import Path

import pytest

from jaxspec.bench.grid import DrafterChoice, EnginePoint, Grid
from jaxspec.bench.measure import Run
from jaxspec.bench.record import Spread
from jaxspec.bench.rounds import PLAIN, SPECULATIVE
from jaxspec.bench.sweep import Sweep
from jaxspec.serve.request import SpeculationMetrics
from jaxspec.topology import chain, tree
from lab.auto_against_fixed import CLEAR, Regret, line_of, measure, regret_of, subjects_of
from tests.unit.serve.tiny_model import write_tiny_model


def a_run(tokens_per_s: float) -> Run:
    return Run([], [], 0, 1.0, round(100 * tokens_per_s), 100.0, 0, SpeculationMetrics(), [], {})


def test_regret_by_hand():
    """Three rounds: K = 2 is best by the median, plain decoding counts as a fixed length, ratios are paired."""
    regret = Regret.of([9.0, 20.0, 12.0], {"0": [10.0, 10.0, 10.0], "1": [5.0, 40.0, 5.0], "2": [10.0, 20.0, 15.0]})
    # Without the first or the last round K = 1 is best (a median of 2.25), else K = 2 is.
    assert regret == Regret({"1": 0.5, "2": 1.5}, "2", Spread(0.9, 0.8, 1.0), Spread(1.8, 1.0, 2.4))
    again = Regret.of([9.0, 20.0], {"0": [10.0, 10.0], "1": [5.0, 40.0]}, [10.0, 9.0])
    assert again.plain_again == Spread(0.95, 0.9, 1.0)
    slower = Regret.of([10.0], {"0": [10.0], "1": [8.0]})
    assert (slower.best, slower.over_best.median, slower.over_foreseen) == ("0", 1.0, None)


def test_a_fixed_length_that_loses_by_its_interval_has_no_more_turns():
    """Slower in eleven rounds of twelve; and in nine of twelve, which luck explains."""
    ten = [10.0] * 12
    slower, luckier = [11.0, *[9.0] * 11], [*[11.0] * 3, *[9.0] * 9]
    assert Regret.clearly_slower({"0": ten, "1": slower, "2": luckier}) == ["1"]


def test_fixed_lengths_that_lost_every_round_have_no_more_turns():
    """K = 1 loses each round to plain decoding, K = 2 wins one of the first four; the others always go on."""
    rates = {"plain": 10.0, "plain again": 9.5, "speculative": 11.0, "fixed 1": 8.0, "fixed 2": 9.0}
    ran = []

    def subject(name):
        def run(part):
            ran.append(name)
            return a_run(12.0 if name == "fixed 2" and ran.count(name) == 3 else rates[name])

        return run

    subjects = {name: subject(name) for name in rates}
    rounds = measure(subjects, [slice(0, 1)], learns=0, rounds=range(7, 8), precision=0.0)
    assert [sum(name in one for one in rounds) for name in rates] == [7, 7, 7, CLEAR, 7]
    assert len(ran) == 3 * (1 + 7) + 1 + CLEAR + 1 + 7, "and one each to warm up"
    regret = regret_of(rounds)
    assert (regret.best, regret.fixed) == ("0", {"1": 0.8, "2": 0.9})
    assert (regret.over_best.median, regret.over_best.low, regret.over_best.high) == (1.1, 1.1, 1.1)
    assert regret.plain_again == Spread(0.95, 0.95, 0.95, 0.95, 0.95)


@pytest.mark.parametrize(
    ("every", "precision", "count"), [(10, 9.0, 6), (10, 0.5, 6), (10, 0.15, 9), (2, 0.15, 20), (2, 0.25, 6)]
)
def test_rounds_go_on_until_intervals_are_narrow(every: int, precision: float, count: int):
    """Some rounds are 1.2 instead of 1.0 of plain decoding: of nine or more the interval leaves one of them out."""
    ran = []

    def subject(name):
        def run(part):
            ran.append(name)
            lucky = name == SPECULATIVE and (ran.count(name) - 2) % every == 0
            return a_run(12.0 if lucky else 8.0 if name.startswith("fixed") else 10.0)

        return run

    subjects = {name: subject(name) for name in (PLAIN, SPECULATIVE, "fixed 1")}
    rounds = measure(subjects, [slice(0, 1)], learns=0, rounds=range(6, 21), precision=precision)
    assert len(rounds) == count
    assert {len(one) for one in rounds} == {2, 3}


def test_the_choice_learns_in_more_rounds_alone():
    ran = []
    subjects = {name: lambda part, name=name: ran.append(name) or a_run(1.0) for name in (PLAIN, SPECULATIVE)}
    rounds = measure(subjects, [slice(0, 1), slice(1, 2)], learns=2, rounds=range(1, 2), precision=0.0)
    assert len(rounds) == 1
    assert sorted(ran[:4]) == [PLAIN] * 2 + [SPECULATIVE] * 2
    assert ran[4:8] == [SPECULATIVE] * 4
    assert sorted(ran[8:]) == [PLAIN] * 2 + [SPECULATIVE] * 2


@pytest.mark.slow
def test_auto_and_every_fixed_length_and_tree(tmp_path: Path):
    choice = DrafterChoice.parse('{"method": "ngram", "prompt_lookup_min": 1, "speculative_token_trees": [[2]]}')
    grid = Grid((choice,), ("auto",), (1,), (0.0,), ("random",), (6,), (8,), requests=2)
    sweep = Sweep(write_tiny_model(tmp_path / "tiny"), grid, {"prefill_buckets": (16,), "steps_per_dispatch": 2})
    engine, (scenario,) = EnginePoint(1, choice, "auto"), grid.scenarios()
    llm = sweep.open(engine)
    control = llm.engine.control
    subjects = subjects_of(sweep, llm, engine, scenario)
    rounds = measure(subjects, sweep.parts(engine, scenario), learns=1, rounds=range(1, 2), precision=0.0)
    assert llm.engine.control is control, "given back after every run that was held at one length"
    assert all(llm.engine.metrics.arms[arm].steps for arm in (*map(chain, range(1, 6)), tree((2,)))), "each ran"
    line = line_of(engine, scenario, rounds)
    assert line["same_text"] is True, "that of every fixed length, too"
    assert sorted(line["fixed"]) == ["1", "2", "3", "4", "5", "[2]"]
    assert 0 < line["decision_s"] < 0.1
