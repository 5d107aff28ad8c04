"""Acceptance of chains and trees, and what each kind of drafter runs."""

from dataclasses import replace

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.cost import Rates
from jaxspec.perf.drafting import (
    ASSUMED,
    KINDS,
    AcceptanceModel,
    DraftCost,
    acceptance_of_positions,
    draft_time,
    head_for,
)
from jaxspec.perf.moesd import acceptance_length, expected_experts
from tests.unit.perf.models import dense_model, routed_model

LAYERS, HEAD = Rates(layer_s=1.0), Rates(byte_s=1.0)


def time_s(kind: str, rates: Rates, branching: tuple[int, ...], **model: object) -> float:
    draft = DraftCost(kind, None if kind == "ngram" else dense_model(**model))
    return draft_time(draft, rates, rows=1, branching=branching, context=0)


@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_chain_commits_what_leviathan_says(length: int):
    assert AcceptanceModel((0.7,)).length((1,) * length) == pytest.approx(
        acceptance_length(acceptance=0.7, length=length)
    )


def test_positions_that_engines_report():
    """Qwen3-Next: .912 .776 .616 are 3.30 tokens; a fourth draft is as likely as the third behind two."""
    found = acceptance_of_positions([0.912, 0.776, 0.616])
    assert found.length((1, 1, 1)) == pytest.approx(3.304)
    assert found.length((1, 1, 1, 1)) == pytest.approx(3.304 + 0.616 * 0.616 / 0.776)
    with pytest.raises(ConfigError, match="cannot rise"):
        acceptance_of_positions([0.5, 0.7])
    with pytest.raises(ConfigError, match="at least one position"):
        acceptance_of_positions([])


def test_what_was_committed_touches_experts_at_one_position():
    """Of the last layer; those before it run at all of them, K + 1."""
    rates, one = Rates(expert_byte_s=1.0), replace(routed_model().layers[-1], count=1)
    two = replace(one, count=2)
    single, double = (
        draft_time(DraftCost("mtp", replace(routed_model(), layers=(x,))), rates, rows=1, branching=(1,), context=0)
        for x in (one, two)
    )
    assert single == pytest.approx(one.top_k * one.expert_bytes)
    assert double - single == pytest.approx(
        expected_experts(num_experts=one.experts, top_k=one.top_k, tokens=2) * one.expert_bytes
    )


def test_siblings_help_where_the_best_draft_failed():
    a = AcceptanceModel((0.6,), sibling=0.5)
    assert a.length((2,)) == pytest.approx(1 + 0.6 + 0.4 * 0.5)
    assert a.length((3,)) == pytest.approx(1 + 0.6 + 0.4 * (0.5 + 0.5 * 0.25))
    both = 0.6 + 0.4 * 0.5
    assert a.length((2, 2)) == pytest.approx(1 + both + both * both)
    assert a.length((2, 1)) == pytest.approx(1 + both + both * 0.6)


def test_a_draft_model_runs_one_pass_more_than_it_drafts():
    """The last pass only fills the cache, without a head."""
    assert time_s("draft_model", LAYERS, (1, 1, 1)) == 2 * 4
    dense = dense_model(layers=())
    heads = draft_time(DraftCost("draft_model", dense), HEAD, rows=1, branching=(1, 1, 1), context=0)
    assert heads == 3 * (500 + 8 * 4 * 50)


def test_prediction_continues_from_the_targets_states():
    """K - 1 cells of one layer each, and one pass of all layers over what was committed."""
    one = dense_model().layers[0]
    layers = (one.__class__(**{**one.__dict__, "count": 1}),)
    for kind in ("mtp", "eagle"):
        assert time_s(kind, LAYERS, (1, 1, 1), layers=layers) == 2 + 1
        assert time_s(kind, LAYERS, (1,), layers=layers) == 1


def test_medusa_runs_each_head_once_and_lookup_none():
    assert time_s("medusa", LAYERS, (1, 1, 1), layers=()) == 0
    heads = draft_time(DraftCost("medusa", dense_model(layers=())), HEAD, rows=2, branching=(1, 1), context=0)
    assert heads == 2 * (500 + 2 * 8 * 4 * 50)
    assert time_s("ngram", LAYERS, (1, 1, 1)) == 2
    read = draft_time(DraftCost("ngram"), HEAD, rows=4, branching=(1,), context=100)
    assert read == 4 * 100 * 32
    assert time_s("ngram", LAYERS, ()) == 0


def test_a_tree_drafts_level_by_level():
    rates = Rates(position_s=1.0, byte_s=1.0)
    levels = draft_time(DraftCost("draft_model", dense_model(layers=())), rates, rows=1, branching=(2, 2), context=0)
    assert levels == (500 + 1600) + (500 + 2 * 1600), "anchor, 2 nodes; the last level has no head"


def test_usual_heads():
    target = routed_model(model_dim=100, vocab_size=64000)
    eagle, medusa = head_for(target, "eagle"), head_for(target, "medusa")
    assert eagle.memory_bytes(3) == 2 * 19 * 100 * 100 + 2 * 100 * 32000
    assert medusa.memory_bytes(3) == 3 * 2 * (100 * 100 + 100 * 64000)
    assert DraftCost("mtp", target).memory_bytes(3) == 0, "it is a part of the target"
    with pytest.raises(ConfigError, match="no usual size"):
        head_for(target, "mtp")


def test_assumed_acceptance_says_where_it_comes_from():
    assert set(ASSUMED) == set(KINDS)
    for low, likely, high, source in ASSUMED.values():
        assert low.length((1, 1, 1)) < likely.length((1, 1, 1)) < high.length((1, 1, 1))
        assert source


def test_mistakes():
    with pytest.raises(ConfigError, match="known are ngram, draft_model"):
        DraftCost("magic")
    with pytest.raises(ConfigError, match="needs a model of its own"):
        DraftCost("mtp")
    with pytest.raises(ConfigError, match="takes no model"):
        DraftCost("ngram", dense_model())
    with pytest.raises(ConfigError, match="probabilities from 0 to 1"):
        AcceptanceModel((1.2,))
