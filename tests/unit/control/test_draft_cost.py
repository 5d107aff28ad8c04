"""The budget of verifications, against made-up machines whose costs are known."""

import math

import numpy as np
import pytest

from jaxspec.control.decision import Outcome
from jaxspec.control.draft_cost import CONFIDENCE_STEPS, UNLIMITED, DraftCostSpec, StepCostFit, VerifyBudget

BASE_S, TOKEN_S, EXPERT_S, DEPTH_S, STEPS, DRAFTS = 0.02, 2e-4, 1e-4, 1e-3, 8, 4
NOTHING = np.zeros((2, 2, CONFIDENCE_STEPS))


def play(budget: VerifyBudget, dispatches: int, rows: int = 4, spikes: float = 0.0, expert_s: float = 0.0) -> None:
    """Dispatches whose drafts are cut at random where anything has a price."""
    rng = np.random.default_rng(0)
    for _ in range(dispatches):
        prices = budget.prices(DRAFTS, rows)
        cuts = prices["tok_per_s"] > 0 or prices["min_confidence"] > 0
        lengths = rng.integers(0, DRAFTS + 1, (STEPS, rows)) if cuts else np.full((STEPS, rows), DRAFTS)
        drafted, deepest = lengths.sum() / STEPS, lengths.max(axis=1).mean()
        touched = 8 * (1 - 0.75 ** (rows + drafted)) - 8 * (1 - 0.75**rows)
        step_s = BASE_S + TOKEN_S * drafted + DEPTH_S * deepest + expert_s * touched
        step_s *= 1 + 0.01 * rng.standard_normal() + 9 * (rng.random() < spikes)
        accepted = {(DRAFTS, 0): rng.integers(0, 3, rows * STEPS).tolist()}
        outcome = Outcome(rows, STEPS, step_s * STEPS, accepted, drafted=drafted, depth=deepest)
        budget.record(DRAFTS, outcome, NOTHING)


@pytest.mark.parametrize("spikes", [0.0, 0.05])
def test_prices_are_the_machines(spikes: float):
    budget = VerifyBudget(0, 0)
    play(budget, 600, spikes=spikes)
    assert budget.prices_s["token"] == pytest.approx(TOKEN_S, rel=0.3)
    assert budget.prices_s["depth"] == pytest.approx(DEPTH_S, rel=0.3)
    assert budget.prices_s["expert"] == 0
    if not spikes:
        rate = float(budget.prices(DRAFTS, 4)["tok_per_s"])
        assert rate == pytest.approx(4 * 2 / (BASE_S + 8 * TOKEN_S + 3.5 * DEPTH_S), rel=0.15)


def test_what_a_step_takes_is_explained_whatever_moves_together():
    """Drafts of one row, their depth and their experts say the same: what all of them cost together is right."""
    budget = VerifyBudget(8, 2)
    play(budget, 600, rows=1, expert_s=EXPERT_S)
    price = budget.prices_s
    assert min(price.values()) >= 0
    fresh = 8 * 0.75 - 8 * 0.75**3
    found = price["token"] * 2 + price["depth"] * 2 + price["expert"] * fresh
    assert found == pytest.approx(TOKEN_S * 2 + DEPTH_S * 2 + EXPERT_S * fresh, rel=0.2)


def test_nothing_has_a_price_until_it_is_known():
    spec = DraftCostSpec(first=8, trial_every=4)
    budget = VerifyBudget(0, 0, spec=spec)

    def tried(prices) -> tuple[float, int]:
        assert not np.any([prices["tok_per_s"], prices["token_s"], prices["expert_s"], prices["depth_s"]])
        return round(float(prices["min_confidence"]), 6), int(prices["max_drafts"])

    wanted = [(least, math.ceil(share * DRAFTS) if share < 1 else UNLIMITED) for least, share in spec.trials]
    assert len(set(wanted)) == 3, "nothing is cut, by confidence, by depth"
    for dispatch in range(8):
        assert tried(budget.prices(DRAFTS, 4)) == wanted[dispatch % 4]
        play(budget, 1)
    play(budget, 32)
    for dispatch in range(40, 56):
        prices = budget.prices(DRAFTS, 4)
        if dispatch % 4:
            assert float(prices["tok_per_s"]) > 0
            assert (float(prices["min_confidence"]), int(prices["max_drafts"])) == (0, UNLIMITED)
        else:
            assert float(prices["tok_per_s"]) == 0
            assert (float(prices["min_confidence"]), int(prices["max_drafts"])) == pytest.approx(
                wanted[dispatch // 4 % 4]
            )
        play(budget, 1)
    assert float(budget.prices(DRAFTS, 64)["tok_per_s"]) == 0, "nobody knows how fast so many rows commit"


@pytest.mark.parametrize("seed", range(3))
def test_a_machine_that_drifts_is_not_taken_for_prices(seed: int):
    """For many dispatches in a row it is slower by a tenth, just when texts are such that more is verified, too."""
    rng, times = np.random.default_rng(seed), StepCostFit(DraftCostSpec())
    for dispatch in range(400):
        slow = dispatch // 50 % 2
        drafted, deepest = [(24, 4), (10 + 4 * slow, 4), (24, 4), (12 + 4 * slow, 2)][dispatch % 4]
        step_s = BASE_S + TOKEN_S * drafted + DEPTH_S * deepest
        step_s *= (1 + 0.1 * slow) * (1 + 0.02 * rng.standard_normal())
        times.add((DRAFTS, 4), (drafted, 0.0, deepest, 1 / STEPS), step_s)
    token_s, _, depth_s, _ = times.slopes()
    assert token_s == pytest.approx(TOKEN_S, rel=0.1), "beside the mean of all it would be a quarter more"
    assert depth_s == pytest.approx(DEPTH_S, rel=0.1)


def test_a_machine_that_became_slow_for_good_is_learnt_again():
    times = StepCostFit(DraftCostSpec(dispatches=64))
    for dispatch in range(300):
        drafted = 8 + 8 * (dispatch % 2)
        factor = 3 if dispatch > 100 else 1
        times.add((DRAFTS, 4), (drafted, 0.0, 4.0, 1 / STEPS), factor * (BASE_S + TOKEN_S * drafted))
    assert times.slopes()[0] == pytest.approx(3 * TOKEN_S, rel=0.1)


def test_a_threshold_alone_learns_nothing():
    budget = VerifyBudget(8, 2, by_cost=False, min_confidence=0.4)
    for _ in range(3):
        prices = budget.prices(DRAFTS, 2)
        assert float(prices["min_confidence"]) == pytest.approx(0.4)
        assert prices["max_drafts"] == UNLIMITED
        assert float(prices["tok_per_s"]) == 0
        play(budget, 40)
    assert set(budget.prices_s.values()) == {0.0}


def test_acceptance_is_what_was_accepted_of_such_drafts():
    budget = VerifyBudget(0, 0, spec=DraftCostSpec(drafts=4000))
    outcome = Outcome(4, STEPS, 0.1, {(DRAFTS, 0): [1] * 32})
    seen_HMC = NOTHING.copy()
    seen_HMC[:, 0, 3], seen_HMC[:, 1, 9] = (100, 20), (100, 70)
    for _ in range(20):
        budget.record(DRAFTS, outcome, seen_HMC)
    found_MC = budget.prices(DRAFTS, 4)["accept_MC"]
    assert found_MC[0, 3] == pytest.approx(0.2, abs=0.01)
    assert found_MC[1, 9] == pytest.approx(0.7, abs=0.01)
    assert found_MC[0, 9] == 1, "nothing is cut on a guess"
    seen_HMC[1, 0, 3] = 90
    for _ in range(100):
        budget.record(DRAFTS, outcome, seen_HMC)
    assert budget.prices(DRAFTS, 4)["accept_MC"][0, 3] == pytest.approx(0.9, abs=0.06), "workloads change"
