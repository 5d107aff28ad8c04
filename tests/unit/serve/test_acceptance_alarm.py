"""The alarm of low acceptance: once, with numbers, causes and a command, and never on few drafts or by chance."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.serve.acceptance_alarm import (
    ENOUGH,
    FAR_BELOW,
    AcceptanceAlarm,
    ExpectedAcceptance,
    alarm_of,
    recorded_acceptance,
    stated_acceptance,
    upper_bound,
)  # fmt: skip
from jaxspec.serve.request import SpeculationMetrics

EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}


def counts(accepted: int, tried: int) -> SpeculationMetrics:
    return SpeculationMetrics(num_drafts=tried, num_accepted_tokens_per_pos=[accepted, 0, 0])


def alarm(first: float = 0.6) -> AcceptanceAlarm:
    return AcceptanceAlarm(ExpectedAcceptance(first, "its training measured"), "runs/my head", "models/target")


def test_it_warns_once_with_numbers_causes_and_the_command():
    one = alarm()
    with pytest.warns(UserWarning, match="5% of the first drafts of runs/my head are accepted") as seen:
        one.look(counts(20, 400))
    words = str(seen[0].message)
    assert "its training measured 60%" in words
    assert "by 400 verifications" in words
    assert "another quantization of the target" in words
    assert "jaxspec inspect 'runs/my head' --target models/target" in words
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.look(counts(20, 4000))


def test_it_is_silent_on_few_drafts_and_on_prompts_that_are_only_harder():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alarm().look(counts(0, ENOUGH - 1))
        alarm().look(counts(int(0.25 * 4000), 4000))
        alarm().look(SpeculationMetrics(num_drafts=1000))
        # A share at the threshold is not reported but by a chance of a few in a hundred thousand.
        rng, share = np.random.default_rng(0), FAR_BELOW * 0.6
        for accepted in rng.binomial(400, share, 300):
            alarm().look(counts(int(accepted), 400))


def test_the_bound_is_wilsons():
    assert upper_bound(0, 300) == pytest.approx(16 / (300 + 16))
    assert upper_bound(300, 300) == pytest.approx(1)
    assert upper_bound(30, 300) == pytest.approx(0.19073, abs=1e-4)


def test_what_training_recorded_counts_at_its_lowest(tmp_path: Path):
    assert recorded_acceptance(tmp_path) is None
    held_out = {"k3/t0/acceptance_length": 2.5, "k3/t0/accepted_at_1": 0.8, "k3/t1/accepted_at_1": 0.6}
    (tmp_path / "training.json").write_text(json.dumps({"held_out": held_out}))
    assert recorded_acceptance(tmp_path) == ExpectedAcceptance(0.6, "its training measured")
    one = alarm_of(methods.parse(EAGLE3 | {"model": str(tmp_path)}), Path("target"))
    assert one is not None
    assert (one.expected.first, one.head, one.target) == (0.6, str(tmp_path), "target")
    assert alarm_of(methods.parse({"method": "ngram", "num_speculative_tokens": 3}), Path("target")) is None


def test_a_model_cards_length_is_a_share_of_first_drafts(tmp_path: Path):
    for share in (0.3, 0.7):
        length = sum(share**k for k in range(6))
        assert stated_acceptance(length, 5).first == pytest.approx(share)
    config = EAGLE3 | {"model": str(tmp_path), "expected_acceptance_length": 2.5}
    one = alarm_of(methods.parse(config), Path("target"))
    assert one is not None
    assert one.expected.first == pytest.approx(0.6914, abs=1e-3)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (EAGLE3 | {"model": "x", "expected_acceptance_length": 4.5}, "at most 4 here; got 4.5"),
        (EAGLE3 | {"model": "x", "expected_acceptance_length": 0.5}, "must be a number from 1, got 0.5"),
        ({"method": "ngram", "num_speculative_tokens": 3, "expected_acceptance_length": 2}, "is for draft heads"),
    ],
)
def test_what_cannot_be_expected_is_one_error(config: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        methods.parse(config)
