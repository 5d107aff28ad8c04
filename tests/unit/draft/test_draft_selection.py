"""Drafts that are cut before they are drawn: the law of the text stays, and what does not pay is not drafted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import init_sampling
from jaxspec.decode.telemetry import outcomes
from jaxspec.draft.draft_pruning import PruningConfig
from jaxspec.draft.draft_selection import DraftSelection, empty_selection, select_next
from jaxspec.draft.methods import parse
from jaxspec.draft.parallel import draft_from
from jaxspec.draft.small_lm import SmallLm
from jaxspec.errors import ConfigError
from jaxspec.protocol import Anchor, DraftCosts
from jaxspec.pytree import replace
from jaxspec.topology import Topology, chain
from tests.unit.verify.test_rules import EXACT, Language, continuations, draw_all, endings, same, text_law
from tests.unit.verify.test_rules_texts import MarkovNet, chi_square, markov_texts

CERTAIN = np.ones((2, 4), np.float32)


def prices_of(
    rate=0.0, rows=1.0, token=0.0, expert=0.0, depth=0.0, least=0.0, deepest=99, accept=CERTAIN, routed=(0, 0)
) -> DraftCosts:
    values = (np.asarray(x, np.float32) for x in (rate, rows, token, expert, depth, least, deepest, accept))
    return DraftCosts(*map(jnp.asarray, values), *routed)


def anchor_of(rows: int, prices: DraftCosts | None, limit: Any = 99, temperature: Any = 1.0, token: int = 0) -> Anchor:
    sampling = replace(
        init_sampling(rows, 1),
        temperature_B=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), rows),
        draft_limit_B=jnp.broadcast_to(jnp.asarray(limit, jnp.int32), rows),
        key_BX=jnp.stack([jnp.full(rows, 5, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1),
    )
    zero_B = jnp.zeros(rows, jnp.int32)
    return Anchor(zero_B + token, zero_B, zero_B[:, None], sampling, prices)


def decided(prices: DraftCosts, score_BNV: Any, expert_BNYA: Any = None, limit: Any = 99) -> DraftSelection:
    """All decisions over chains whose distributions are known."""
    rows, drafts = score_BNV.shape[:2]
    anchor = anchor_of(rows, prices, limit)
    layers = None if expert_BNYA is None else expert_BNYA.shape[2]

    def decide(score_BNV, expert_BNYA):
        kept = empty_selection(prices, jnp.ones(rows, bool), drafts, layers)
        for k in range(drafts):
            kept = select_next(kept, anchor, k, score_BNV[:, k], None if expert_BNYA is None else expert_BNYA[:, k])
        return kept

    return jax.jit(decide)(jnp.asarray(score_BNV, jnp.float32), expert_BNYA)


def law_with(rule: str, topology: Topology, p: Callable, drawn, valid_XN: np.ndarray) -> np.ndarray:
    found = endings(rule, topology, p, drawn, valid=valid_XN)
    np.testing.assert_allclose(found.prob_XT.sum(axis=1), 1, atol=EXACT)
    return text_law(topology, p, found)


LAWFUL = {"confidence": prices_of(least=0.35), "price": prices_of(rate=5.0, token=0.1, accept=[[0.1, 0.6, 0.8, 1]] * 2)}


@pytest.mark.parametrize("prices", LAWFUL)
@pytest.mark.parametrize("rule", ["reject", "block"])
def test_cuts_before_drawing_keep_the_targets_law(rule: str, prices: str):
    topology, p, q = chain(3), Language(3, 1), Language(3, 2)
    drawn = draw_all(topology, q, np.ones(3, bool))
    valid_XN = np.asarray(decided(LAWFUL[prices], drawn[2]).valid_BN)
    lengths = valid_XN.sum(axis=1)
    assert (np.diff(valid_XN.astype(int), axis=1) <= 0).all(), "behind a cut nothing is verified"
    assert len(set(lengths.tolist())) > 1, "chains of several lengths, by what was drawn before"
    np.testing.assert_allclose(law_with(rule, topology, p, drawn, valid_XN), continuations(p, (), 4), atol=EXACT)


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_cuts_by_what_was_drawn_do_not(rule: str):
    """With p = q, a draft outside of S that is dropped comes back only as often as it is drawn anew."""
    p, topology, unsure = same((0.6, 0.3, 0.1)), chain(1), np.array([1, 2])
    drawn = draw_all(topology, p, np.ones(1, bool))
    found = law_with(rule, topology, p, drawn, ~np.isin(drawn[0], unsure)).sum(axis=1)
    np.testing.assert_allclose(found[unsure], 0.4 * np.array([0.3, 0.1]), atol=EXACT)
    assert found[0] == pytest.approx(0.6 + 0.4 * 0.6, abs=EXACT)
    for least in (0.59, 0.61):
        valid_XN = np.asarray(decided(prices_of(least=least), drawn[2]).valid_BN)
        assert valid_XN.all() == (least < 0.6)
        np.testing.assert_allclose(law_with(rule, topology, p, drawn, valid_XN).sum(axis=1), p(()), atol=EXACT)


ACCEPT = [[0.1, 0.3, 0.6, 0.9]] * 2
# Rows share the second one: an expert costs the less, the more rows touch it.
SHARED = {
    "confidence": prices_of(least=0.45),
    "budget": prices_of(rate=1.0, rows=0, token=0.09, expert=0.7, accept=ACCEPT, routed=(16000, 1)),
}


@pytest.mark.parametrize("cut", SHARED)
@pytest.mark.parametrize("rule", ["reject", "block"])
def test_texts_of_many_cut_steps_have_the_targets_law(rule: str, cut: str):
    def small_lm(params, net) -> SmallLm:
        return SmallLm(params, net, chain(2), block=16)

    texts, lengths = markov_texts(rule, small_lm, 16000, 4, SHARED[cut])
    assert (lengths > 0.02).all(), "chains of every length"
    assert chi_square(texts) > 1e-3


def proposed(prices: DraftCosts | None, rows: int, rule: str = "reject", **anchor: Any):
    q = np.random.default_rng(9).dirichlet(np.ones(3), 3)
    drafter = SmallLm(jnp.log(jnp.asarray(q, jnp.float32)), MarkovNet(3), chain(3), block=16)
    state = drafter.init_state(rows, 16, 4)
    return q, jax.jit(lambda s, a: drafter.propose(s, a, rule)[0])(state, anchor_of(rows, prices, **anchor))


def test_a_decision_sees_only_the_tokens_before():
    q, proposal = proposed(prices_of(least=0.3), 500)
    sure = q.max(axis=1)
    tokens, valid = np.asarray(proposal.token_BN), np.asarray(proposal.valid_BN)
    certain = np.full(500, sure[0])
    for k in range(3):
        wanted = (certain >= 0.3) & (valid[:, k - 1] if k else True)
        np.testing.assert_array_equal(valid[:, k], wanted)
        if wanted.any():
            assert len(set(tokens[wanted, k].tolist())) == 3, "whatever was drawn there"
        certain = certain * sure[tokens[:, k]]
    assert 0 < valid[:, 2].sum() < 500


def test_what_costs_nothing_is_never_cut():
    (_, whole), (_, uncut) = proposed(None, 2), proposed(prices_of(), 2)
    np.testing.assert_array_equal(uncut.token_BN, whole.token_BN)
    np.testing.assert_array_equal(uncut.logp_BNV, whole.logp_BNV)
    assert np.asarray(uncut.valid_BN).all()
    assert whole.confidence_BN is None


def test_drafting_stops_where_no_row_goes_on():
    _, unsure = proposed(prices_of(least=0.9999), 2)
    assert not np.asarray(unsure.valid_BN).any()
    assert np.asarray(unsure.confidence_BN).astype(bool).tolist() == [[True, False, False]] * 2
    _, limited = proposed(prices_of(), 2, limit=[1, 0])
    assert np.asarray(limited.valid_BN).tolist() == [[True, False, False], [False] * 3]
    assert np.asarray(limited.confidence_BN)[0].astype(bool).tolist() == [True, True, False]


def sure(*confidences: list[float]) -> np.ndarray:
    """Scores over two tokens with these largest probabilities, [B, N, 2]."""
    c = np.asarray(confidences)
    return np.log(np.stack([c, 1 - c], axis=-1))


@dataclass(frozen=True)
class Side:
    """Predicts every depth at once, from nothing but the depth; the last axis of what it reads are the logits."""

    topology: Topology

    def logits(self, last_BTD):
        return last_BTD

    def known(self, last_BTD):
        return None

    def experts(self, last_BTD):
        return jnp.broadcast_to(jnp.arange(last_BTD.shape[1], dtype=jnp.int32)[:, None, None], (2, 3, 1, 1))


def test_drafts_made_side_by_side_are_cut_too():
    scores = jnp.asarray(sure([0.9, 0.9, 0.6], [0.9, 0.6, 0.6]), jnp.float32)
    prices = prices_of(rate=1.0, rows=0, expert=0.3, accept=[[0.0, 0.0, 0.4, 1.0]] * 2, routed=(4, 1))
    anchor, scorer = anchor_of(2, prices), Side(chain(3))
    draft = jax.jit(lambda x, valid_B: draft_from(scorer, x, anchor, "reject", valid_B))
    # Both rows touch the same new expert at every depth: 2, 1.4, and 0.56 (0.4 and 0.16) tokens pay for it.
    assert np.asarray(draft(scores, jnp.ones(2, bool)).valid_BN).all()
    assert np.asarray(draft(scores, jnp.array([False, True])).valid_BN).tolist() == [[False] * 3, [True, True, False]]
    np.testing.assert_allclose(draft(scores, jnp.ones(2, bool)).confidence_BN[1], [0.9, 0.6, 0.6], rtol=1e-6)


def test_predicted_experts_cost_only_what_no_other_row_touches():
    scores = sure([0.6], [0.9], [0.6])
    accept = [[0.0, 0.0, 0.5, 1.0]] * 2
    chosen = jnp.asarray([[[[1, 0]]], [[[0, 1]]], [[[2, 3]]]], jnp.int32)
    prices = prices_of(rate=10.0, rows=0, expert=0.04, accept=accept, routed=(4, 2))
    # An expert takes the time of 0.4 tokens. The second row's 1 pays for two; of the others with 0.5, the first needs
    # no more, the third two.
    assert np.asarray(decided(prices, scores, chosen).valid_BN)[:, 0].tolist() == [True, True, False]
    both = np.concatenate([scores, sure([0.6], [0.6], [0.9])], axis=1)
    again = np.concatenate([chosen, [[[[2, 3]]], [[[0, 1]]], [[[0, 1]]]]], axis=1)
    # The next drafts are worth 0.25 and 0.5: one needs new experts, the other's are those of the drafts before.
    assert np.asarray(decided(prices, both, jnp.asarray(again)).valid_BN)[:, 1].tolist() == [False, True, False]
    anchors = prices_of(rate=10.0, rows=2, expert=0.04, accept=accept, routed=(4, 2))  # touch 3 of 4 by themselves
    assert np.asarray(decided(anchors, scores, chosen).valid_BN).all()


def test_expected_experts_fall_with_every_token():
    # A (1 - A / E)^n is 2, 1, 0.5, ... for n tokens before, the anchor of each row among them.
    scores = sure([0.9, 0.9, 0.9], [0.9, 0.9, 0.9])
    for expert, wanted in ((2.7, 0), (2.6, 6)):  # at 2.6 the second row makes up for the first one's loss
        prices = prices_of(rate=1.0, rows=2, expert=expert, routed=(4, 2))
        assert np.asarray(decided(prices, scores).valid_BN).sum() == wanted


def test_a_depth_is_drafted_if_all_rows_together_pay_for_it():
    scores = sure([0.9, 0.6], [0.9, 0.6], [0.6, 0.6])
    accept = [[0.0, 0.0, 0.5, 1.0]] * 2
    for depth_s, wanted in ((1.25, 2), (1.3, 1), (2.5, 1), (2.6, 0)):
        prices = prices_of(rate=4.0, depth=depth_s / 4, accept=accept)
        assert np.asarray(decided(prices, scores).valid_BN).any(axis=0).sum() == wanted, depth_s


def test_outcomes_by_confidence():
    confidence = jnp.asarray([[0.1, 0.9, 1.0], [0.3, 0.3, 0.9], [0.9, 0.9, 0.9]])
    live = jnp.asarray([[True, True, True], [True, True, False], [False] * 3])
    found = outcomes(confidence, live, jnp.asarray([1, 2, 0]), jnp.asarray([False, True, True]), 4)
    np.testing.assert_array_equal(found[0], [[1, 0, 0, 1], [0, 2, 0, 0]])
    np.testing.assert_array_equal(found[1], [[1, 0, 0, 0], [0, 2, 0, 0]])


DRAFT = {"model": "draft", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("config", "pruning"),
    [
        ({}, PruningConfig()),
        ({"verify_budget": "off", "draft_confidence_threshold": 0}, PruningConfig()),
        ({"verify_budget": "auto"}, PruningConfig(by_cost=True)),
        ({"draft_confidence_threshold": 0.25}, PruningConfig(min_confidence=0.25)),
        ({"verify_budget": "auto", "draft_confidence_threshold": 0.25}, PruningConfig(True, 0.25)),
    ],
)
def test_settings(config: dict[str, Any], pruning: PruningConfig):
    assert parse(DRAFT | config).pruning == pruning
    assert pruning.enabled == bool(pruning != PruningConfig())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DRAFT | {"verify_budget": 8}, 'verify_budget must be "auto" or "off", got 8'),
        (DRAFT | {"draft_confidence_threshold": 1}, "must be a number from 0 to below 1, got 1"),
        (DRAFT | {"draft_confidence_threshold": -0.1}, "must be a number from 0 to below 1, got -0.1"),
        (DRAFT | {"draft_confidence_threshold": "low"}, "must be a number from 0 to below 1, got 'low'"),
        (DRAFT | {"draft_confidence_threshold": float("nan")}, "must be a number from 0 to below 1, got nan"),
        ({"method": "ngram", "num_speculative_tokens": 3, "verify_budget": "auto"}, "leave verify_budget out"),
        (DRAFT | {"method": "hybrid", "draft_confidence_threshold": 0.5}, "leave draft_confidence_threshold out"),
        ({"model": "draft", "speculative_token_tree": [2, 2], "verify_budget": "auto"}, "cuts chains, not trees"),
    ],
)
def test_settings_that_are_refused(config: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        parse(config)
