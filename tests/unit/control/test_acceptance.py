"""What drafts of an arm, and of requests that are sampled alike, are expected to have accepted."""

from collections.abc import Sequence

import pytest

from jaxspec.control.acceptance import Acceptance
from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import Request
from jaxspec.control.spec import ControlSpec
from jaxspec.serve.request import SamplingParams
from jaxspec.topology import PLAIN, AnyTopology, chain, tree
from tests.unit.control.machine import ARMS, Machine

TIMES = [1.0, 1.3, 1.6, 1.9, 2.2, 2.5]
TREE, CHAINS = tree((2, 2)), (PLAIN, chain(1), chain(2))


def known(*hits: int, arms: Sequence[AnyTopology] = CHAINS) -> Acceptance:
    """Requests of kinds 0, 1, ... whose drafts of two tokens have so many accepted."""
    acceptance = Acceptance(arms, ControlSpec())
    for _ in range(60):
        acceptance.add(2, {(2, kind): [count] * 8 for kind, count in enumerate(hits)})
    return acceptance


def test_a_step_commits_the_targets_token_and_what_survives():
    acceptance = Acceptance(CHAINS, ControlSpec())
    assert acceptance.tokens(2, 2, [])[0] == pytest.approx(1 + 0.5 + 0.25), "nothing is known"
    for _ in range(50):
        acceptance.add(2, {(2, 0): [0] * 4 + [1] * 2 + [2] * 4})
    tokens, error = acceptance.tokens(2, 2, [])
    assert tokens == pytest.approx(1 + 0.6 + 0.4, abs=0.01)
    assert error < 0.1
    assert acceptance.tokens(1, 1, [])[0] == pytest.approx(1.6, abs=0.01), "long drafts tell about short ones"


def test_positions_that_were_not_tried_go_on_as_those_before_them_and_less_surely():
    acceptance = Acceptance((PLAIN, chain(1), chain(3)), ControlSpec())
    for _ in range(50):
        acceptance.add(1, {(1, 0): [1] * 8 + [0] * 2})
    tokens, error = acceptance.tokens(2, 3, [])
    assert 1 + 0.8 + 0.7**2 + 0.7**3 < tokens < 1 + 0.8 + 0.8**2 + 0.8**3, "of none before the first a half is expected"
    assert error > 3 * acceptance.tokens(1, 1, [])[1]


def test_texts_that_change_are_noticed():
    acceptance = known(2)
    for _ in range(200):
        acceptance.add(2, {(2, 0): [0] * 8})
    assert acceptance.tokens(2, 2, [])[0] < 1.1


def test_limits_cut_what_a_request_accepts():
    acceptance = known(2)
    assert acceptance.tokens(2, 2, [Request(limit=1)])[0] == pytest.approx(2.0, abs=0.02)
    mixed = [Request(), Request(limit=0), Request(limit=1), Request(limit=2)]
    assert acceptance.tokens(2, 2, mixed)[0] == pytest.approx((3 + 1 + 2 + 3) / 4, abs=0.02)


def test_requests_are_expected_to_do_as_their_kind():
    acceptance = known(2, 0)
    assert acceptance.tokens(2, 2, [Request(0)])[0] == pytest.approx(3.0, abs=0.1)
    assert acceptance.tokens(2, 2, [Request(1)])[0] == pytest.approx(1.0, abs=0.1)
    both = acceptance.tokens(2, 2, [Request(0), Request(0), Request(0), Request(1)])[0]
    assert both == pytest.approx((3 * 3 + 1) / 4, abs=0.1), "side by side they count by their requests"


def test_a_tree_begins_with_what_chains_accept_and_then_knows_its_own():
    acceptance = known(1, arms=(*CHAINS, TREE))
    chains, unsure = acceptance.tokens(2, 2, [])
    assert acceptance.tokens(3, 2, [])[0] == pytest.approx(chains, abs=0.01)
    assert acceptance.tokens(3, 2, [])[1] > unsure
    for _ in range(20):
        acceptance.add(3, {(2, 0): [2] * 8})
        acceptance.add(2, {(2, 0): [1] * 8})
    assert acceptance.tokens(3, 2, [])[0] > 2.5
    assert acceptance.tokens(2, 2, [])[0] < 2.25


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


def test_requests_of_two_kinds_in_turns_have_each_its_own_arm():
    """Those of one accept nearly all, the others nothing: from the first step of each on, without a change of texts."""
    machines = {0: Machine(TIMES, [0.95] * 5, noise=0.02), 1: Machine(TIMES, [0.02] * 5, noise=0.02)}
    control = Adaptive(ARMS)
    first: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(100):
        for kind, machine in machines.items():
            for at in range(4):
                decision = control.choose(1, 0, [Request(kind)])
                if not at and not decision.probe:
                    first[kind].append(decision.length)
                control.record(decision, machine.run(decision.arm, 1, kind))
    assert min(len(lengths) for lengths in first.values()) > 70, "and few are trials"
    assert set(first[0][-50:]) <= {4, 5}
    assert set(first[1][-50:]) == {0}
