"""Drafts that are cut where they do not pay: the same text, a cache without holes, and no new program."""

import numpy as np
import pytest

from jaxspec.control.draft_cost import VerifyBudget
from jaxspec.topology import chain
from tests.oracle.conftest import Lab, Wheel, generate, mixed_requests, tokens_of


@pytest.mark.parametrize("kind", ["cold", "mixed"])
def test_prices_that_change_give_the_same_text(lab: Lab, kind: str):
    requests, budget = mixed_requests(kind), Wheel()
    engine = lab.engine(lab.drafter("self", chain(4)), budget=budget)
    first = generate(engine, requests[:1], steps=1)
    compiled = engine.programs.programs["dispatch", chain(4)]._cache_size()
    outputs = generate(engine, requests, steps=2)
    assert engine.programs.programs["dispatch", chain(4)]._cache_size() == compiled, "prices are data"
    plain = tokens_of(lab.reference(kind, requests))
    assert tokens_of(first) == plain[:1]
    assert tokens_of(outputs) == plain
    counted = engine.metrics.speculation
    assert engine.metrics.cut_drafts > 0.2 * counted.num_steps
    assert engine.metrics.cut_drafts + counted.num_draft_tokens == 4 * counted.num_steps
    tried_MC, accepted_MC = budget.outcome_HMC
    assert tried_MC[0].sum() > 0
    assert (tried_MC[1].sum() > 0) == (kind == "mixed")
    # The target as its own drafter is always right, unless a cut left a hole in its cache.
    np.testing.assert_array_equal(tried_MC, accepted_MC)


def test_a_threshold_alone_cuts_some_drafts_and_not_all(lab: Lab):
    requests, budget = mixed_requests("cold"), VerifyBudget(0, 0, by_cost=False, min_confidence=0.1)
    engine = lab.engine(lab.drafter("self", chain(4)), budget=budget)
    assert tokens_of(generate(engine, requests)) == tokens_of(lab.reference("cold", requests))
    counted = engine.metrics.speculation
    assert 0 < counted.num_draft_tokens < 4 * counted.num_steps
    assert engine.metrics.cut_drafts + counted.num_draft_tokens == 4 * counted.num_steps
