"""What is known of a request before it begins: how it is sampled, and what others that are sampled so accepted."""

import pytest
from jaxspec.serve.adaptive import Adaptive
from jaxspec.serve.control import Fixed
from jaxspec.serve.survival import KIND_MEMORY, PUT_OFF, SHARED, RequestSurvival, Survival
from tests.unit.serve.test_control import ARMS, STEPS, Machine, mean

from jaxspec.serve.request import SamplingParams
from jaxspec.topology import chain

EVERYONE = Survival(2)
EVERYONE.add(2, [0] * 200 + [1] * 80 + [2] * 120)  # 120 of 200 go on, and one more counts as one half
TIMES = [1.0, 1.3, 1.6, 1.9, 2.2, 2.5]


def known(*kinds: int) -> RequestSurvival:
    """Requests of these kinds, where those of kind 0 accepted both drafts before, and those of kind 1 none."""
    requests = RequestSurvival(len(kinds), 2, 64.0)
    for kind, hits in ((0, 2), (1, 0)):
        requests.enter(0, None, kind)
        requests.add(2, {0: [hits] * 400})
        requests.leave(0)
    for row, kind in enumerate(kinds):
        requests.enter(row, None, kind)
    return requests


def test_requests_that_are_sampled_alike_are_of_one_kind():
    settings: list[dict[str, float]] = [
        {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 0.6}, {"temperature": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.1}, {"temperature": 1.0, "repetition_penalty": 1.1},
    ]  # fmt: skip
    kinds = [SamplingParams(**one).kind for one in settings]
    assert len({*kinds}) == len(kinds)
    alike = [SamplingParams(temperature=0.5), SamplingParams(temperature=0.3, top_k=5, seed=1, max_tokens=2)]
    assert {one.kind for one in alike} == {kinds[1]}
    assert SamplingParams(temperature=9e3).kind == kinds[3]


@pytest.mark.parametrize(("kind", "expected"), [(0, [1.0, 1.0]), (1, [0.0, 0.0])])
def test_a_new_request_is_expected_to_do_as_its_kind(kind: int, expected: list[float]):
    assert mean(known(kind), EVERYONE) == pytest.approx(expected, abs=0.02)


def test_of_a_new_kind_everyone_tells():
    assert mean(known(2), EVERYONE) == pytest.approx([0.5, 0.5 * 120.5 / 201])


def test_kinds_side_by_side_count_by_their_requests():
    assert mean(known(0, 0, 0, 1), EVERYONE) == pytest.approx([0.75, 0.75], abs=0.02)


def test_what_a_request_did_itself_outweighs_its_kind():
    requests = known(0, 0)
    requests.add(2, {0: [0] * 64})
    requests.add(2, {1: [2] * 2000})
    of_its_own = SHARED / (SHARED + 64)
    assert mean(requests, EVERYONE)[0] == pytest.approx((of_its_own + 1) / 2, abs=0.02)


def test_one_kind_alone_is_everyone():
    """Its counts are those of everyone, who know more about changes."""
    requests = RequestSurvival(1, 2, 64.0)
    requests.enter(0, None, 1)
    requests.add(2, {0: [2] * 400})
    requests.leave(0)
    requests.enter(0, None, 1)
    assert mean(requests, EVERYONE) == pytest.approx([0.5, 0.5 * 120.5 / 201])


def test_deeper_drafts_than_a_request_allows_say_nothing_of_its_kind():
    """It accepts one draft of two at most; that the second is not accepted is its own wish."""
    requests = RequestSurvival(1, 2, 64.0)
    for limit, hits in ((None, 2), (1, 1)):
        requests.enter(0, limit)
        requests.add(2, {0: [hits] * 400})
        requests.leave(0)
    requests.enter(0, None, 1)
    requests.add(2, {0: [0] * 400})
    requests.leave(0)
    requests.enter(0)
    assert mean(requests, EVERYONE) == pytest.approx([1.0, 1.0], abs=0.02)


def test_what_nobody_asks_for_does_not_pile_up():
    """A fixed number of drafts never asks what kinds accept."""
    control, requests = Fixed(chain(2)), RequestSurvival(1, 2, 64.0)
    requests.enter(0)
    for _ in range(1000):
        control.choose(1, 0, requests)
        requests.add(2, {0: [1] * STEPS})
        assert len(requests._new) <= PUT_OFF
    assert sum(requests._kinds[0]._tried) == pytest.approx(2 * KIND_MEMORY)


def test_requests_of_two_kinds_in_turns_have_each_its_own_arm():
    """Those of one accept nearly all, the others nothing: from the first step of each on, without a change of texts."""
    machines = {0: Machine(TIMES, [0.95] * 5, noise=0.02), 1: Machine(TIMES, [0.02] * 5, noise=0.02)}
    control, requests = Adaptive(ARMS), RequestSurvival(1, 5, 64.0)
    first: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(100):
        for kind, machine in machines.items():
            requests.enter(0, None, kind)
            for at in range(4):
                decision = control.choose(1, 0, requests)
                if not at and not decision.probe:
                    first[kind].append(decision.length)
                outcome = machine.run(decision.arm, 1)
                control.record(decision, outcome)
                requests.add(decision.length, {0: next(iter(outcome.accepted.values()))})
            requests.leave(0)
    assert min(len(lengths) for lengths in first.values()) > 70, "and few are trials"
    assert set(first[0][-50:]) <= {4, 5}
    assert set(first[1][-50:]) == {0}
