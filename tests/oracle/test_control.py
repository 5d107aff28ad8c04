"""Speculation lengths that change from dispatch to dispatch: the same text, and drafters that have missed nothing."""

from dataclasses import dataclass, field

import pytest

from jaxspec.serve.control import ByBatchSize, Decision, Outcome
from jaxspec.topology import chain, tree
from tests.oracle.conftest import Lab, generate, mixed_requests, tokens_of

CYCLE = (0, 3, 0, 0, 2, 3, 1, 0, 2)


@dataclass
class Cycle:
    """Goes through the lengths, whatever happens."""

    lengths: tuple[int, ...]
    order: tuple[int, ...] = CYCLE
    outcomes: list[tuple[Decision, Outcome]] = field(default_factory=list)

    def choose(self, rows: int, waiting: int, requests=()) -> Decision:
        return Decision(self.order[len(self.outcomes) % len(self.order)])

    def record(self, decision: Decision, outcome: Outcome) -> None:
        self.outcomes.append((decision, outcome))


@pytest.mark.parametrize("kind", ["cold", "mixed"])
@pytest.mark.parametrize("name", ["ngram", "self", "random", "mtp"])
def test_lengths_that_change_give_the_same_text(lab: Lab, name: str, kind: str):
    requests = mixed_requests(kind)
    control = Cycle((0, 1, 2, 3))
    engine = lab.engine(lab.drafter(name, chain(3)), control=control)
    outputs = generate(engine, requests, steps=2)
    assert tokens_of(outputs) == tokens_of(lab.reference(kind, requests))
    assert {decision.length for decision, _ in control.outcomes} == {0, 1, 2, 3}
    if name == "self":
        for decision, outcome in control.outcomes:
            missed = [a for a in outcome.accepted.get(decision.length, []) if a < decision.length]
            assert missed == [], "the target as its own drafter is always right, unless it was not caught up"


def test_a_tree_takes_turns_with_plain_decoding(lab: Lab):
    requests = mixed_requests("cold")
    control = Cycle((0, 2), order=(0, 2, 2, 0, 0, 2))
    engine = lab.engine(lab.drafter("self", tree((2, 2))), control=control)
    assert tokens_of(generate(engine, requests, steps=2)) == tokens_of(lab.reference("cold", requests))
    tried = [a for decision, outcome in control.outcomes if decision.length for a in outcome.accepted[2]]
    assert tried
    assert set(tried) == {2}


def test_outcomes_add_up(lab: Lab):
    requests = mixed_requests("mixed")
    control = Cycle((0, 1, 2, 3))
    engine = lab.engine(lab.drafter("ngram", chain(3)), control=control)
    outputs = generate(engine, requests, steps=3)
    counters = {(m.name, m.labels.get("length")): m.value for m in engine.metrics.counters()}
    steps = sum(outcome.steps for decision, outcome in control.outcomes if decision.length == 2)
    assert counters["jaxspec:arm_steps_total", "2"] == steps > 0
    tokens = sum(value for (name, _), value in counters.items() if name == "jaxspec:arm_tokens_total")
    made = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    assert made - sum(len(o.outputs) for o in outputs) * 4 <= tokens <= made


def test_batch_sizes_choose_the_length(lab: Lab):
    requests = mixed_requests("cold")
    control = ByBatchSize(((1, 2, 3),), otherwise=0)
    engine = lab.engine(lab.drafter("self", chain(3)), control=control)
    assert tokens_of(generate(engine, requests)) == tokens_of(lab.reference("cold", requests))
    arms = engine.metrics.arms
    assert arms[0].dispatches, "eight requests at first"
    assert arms[3].dispatches, "two at the end"
    assert arms[3].tokens > arms[3].steps
