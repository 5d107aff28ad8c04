"""Lengths and trees that change from dispatch to dispatch: the same text, and drafters that have missed nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import ByBatchSize, Decision, Outcome
from jaxspec.serve import engine as engine_module
from jaxspec.serve.warm_up import LINKING, RANDOM, TIMED, DispatchTimer
from jaxspec.topology import PLAIN, AnyTopology, DynamicTree, chain, tree
from tests.oracle.conftest import Lab, SharedPrograms, generate, mixed_requests, tokens_of

CYCLE = tuple(map(chain, (0, 3, 0, 0, 2, 3, 1, 0, 2)))
FLAT, DEEP, GROWN = tree((2, 2)), tree((3, 1, 1)), DynamicTree(top_k=3, steps=3, nodes=8)


@dataclass
class Cycle:
    """Goes through arms, whatever happens."""

    order: tuple[AnyTopology, ...] = CYCLE
    min_rows: tuple[int, ...] = (1,)
    outcomes: list[tuple[Decision, Outcome]] = field(default_factory=list)

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        return tuple(dict.fromkeys(self.order))

    def choose(self, rows: int, waiting: int, requests=(), steps=None) -> Decision:
        turn = len(self.outcomes)
        return Decision(self.order[turn % len(self.order)], min_rows=self.min_rows[turn % len(self.min_rows)])

    def record(self, decision: Decision, outcome: Outcome) -> None:
        self.outcomes.append((decision, outcome))


def tried_all(decision: Decision, outcome: Outcome, kinds: Sequence[int] = range(8)) -> list[int]:
    """Returns what verifications of as many drafts as the decision asked for accepted, of some kinds of requests."""
    tried = outcome.accepted.items()
    return [a for (drafts, kind), counts in tried if drafts == decision.length and kind in kinds for a in counts]


@pytest.mark.parametrize("kind", ["cold", "mixed"])
@pytest.mark.parametrize(
    "name", ["ngram", "self", *(pytest.param(n, marks=pytest.mark.slow) for n in ("random", "mtp"))]
)
def test_lengths_that_change_give_the_same_text(lab: Lab, name: str, kind: str):
    requests = mixed_requests(kind)
    control = Cycle()
    engine = lab.engine(lab.drafter(name, chain(3)), control=control)
    outputs = generate(engine, requests, steps=2)
    assert tokens_of(outputs) == tokens_of(lab.reference(kind, requests))
    assert {decision.length for decision, _ in control.outcomes} == {0, 1, 2, 3}
    assert all(0 < outcome.active <= outcome.rows for _, outcome in control.outcomes)
    begins = [outcome.after_prompt for _, outcome in control.outcomes]
    assert (begins[0], begins[-1]) == (True, False)
    chunks = sum(1 + len(prompt) // 8 for prompt, _ in requests)
    assert 1 < sum(begins) <= chunks, "texts that end make room for prompts"
    if name in ("ngram", "random"):
        assert any(outcome.active < outcome.rows for _, outcome in control.outcomes), "a text ended before its dispatch"
    if name == "self":
        for decision, outcome in control.outcomes:
            # Drafts of sampled text are drawn before truncation, which refuses some of them.
            missed = [a for a in tried_all(decision, outcome, kinds=(0,)) if a < decision.length]
            assert missed == [], "the target as its own drafter is always right, unless it was not caught up"


@pytest.mark.parametrize("name", ["self", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ngram", "mtp"))])
def test_trees_take_turns_with_chains_and_plain_decoding(lab: Lab, name: str):
    """One state serves all arms, also those that are deeper or wider than the drafter that an engine is given."""
    requests = mixed_requests("mixed")
    requests[3][1].speculative = {"num_speculative_tokens": 1}
    requests[6][1].speculative = False
    other = FLAT if name == "ngram" else GROWN
    control = Cycle((PLAIN, DEEP, chain(2), other, PLAIN, DEEP, other, chain(2), chain(2), other, PLAIN))
    engine = lab.engine(lab.drafter(name, chain(2)), control=control)
    outputs = generate(engine, requests, steps=2)
    assert tokens_of(outputs) == tokens_of(lab.reference("mixed", requests))
    assert engine.depth == 3
    assert {decision.arm for decision, _ in control.outcomes} == set(control.arms)
    assert outputs[3].metrics.num_accepted_tokens_per_pos[1:] == [0, 0]
    assert outputs[6].metrics.num_drafts == 0
    if name == "self":
        assert max(arm.nodes for arm in engine.programs.drafters) == DEEP.nodes
        accepted = [a for d, o in control.outcomes if d.arm is DEEP for a in tried_all(d, o)]
        assert set(accepted) == {3}, "the target as its own drafter is always right, unless it was not caught up"
    counters = {(m.name, m.labels.get("tree")): m.value for m in engine.metrics.counters()}
    dispatches = sum(decision.arm is DEEP for decision, _ in control.outcomes)
    assert counters["jaxspec:arm_dispatches_total", "[3,1,1]"] == dispatches > 0


def test_what_a_drafter_is_shown_is_waited_for_before_a_dispatch_is_timed(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    """XLA runs it meanwhile; the dispatch after it would seem to take that much longer."""
    events: list[str] = []

    def noted(owner, name: str, event: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (events.append(event), real(*args, **kwargs))[1])

    noted(SharedPrograms, "catch_up", "shown")
    noted(SharedPrograms, "dispatch", "dispatched")
    noted(engine_module.jax, "block_until_ready", "waited")
    engine = lab.engine(lab.drafter("self", chain(3)), control=Cycle())
    events.clear()
    generate(engine, mixed_requests("cold"), steps=2)
    followed = [after for event, after in pairwise(events) if event == "shown"]
    assert "waited" in followed
    assert set(followed) == {"shown", "waited"}


def test_outcomes_add_up(lab: Lab):
    requests = mixed_requests("mixed")
    control = Cycle()
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
    control = ByBatchSize(((1, 2, chain(3)),), otherwise=PLAIN)
    engine = lab.engine(lab.drafter("self", chain(3)), control=control)
    assert tokens_of(generate(engine, requests)) == tokens_of(lab.reference("cold", requests))
    arms = engine.metrics.arms
    assert arms[PLAIN].dispatches, "eight requests at first"
    assert arms[chain(3)].dispatches, "two at the end"
    assert arms[chain(3)].tokens > arms[chain(3)].steps


@pytest.mark.parametrize("pool", [{}, {"block": 16, "page": 16, "pages": 1 + 24}], ids=["rows", "pool"])
def test_arms_that_ran_beforehand_leave_nothing_behind(lab: Lab, pool: dict, monkeypatch: pytest.MonkeyPatch):
    ran: list[int] = []
    dispatch = SharedPrograms.dispatch

    def counted(self, state, arm, *args, **kwargs):
        ran.append(arm.max_depth)
        return dispatch(self, state, arm, *args, **kwargs)

    monkeypatch.setattr(SharedPrograms, "dispatch", counted)
    requests = mixed_requests("cold")
    control = Adaptive((PLAIN, chain(3)))
    engine = lab.engine(lab.drafter("self", chain(3)), control=control, **pool)
    rounds = len(ran) // 3
    assert ran == [0, 3, 0] * rounds, "before anything is judged, and in turns"
    assert rounds == LINKING + TIMED
    assert control.times.prior is not None
    told = control.times.prior.at(3, 4)
    assert told is not None, "what their steps take is known beforehand"
    assert 0.2 < told[0] < 50
    assert told[1] >= RANDOM
    assert not engine.busy
    assert not np.asarray(engine.state.active_B).any()
    assert engine.metrics.arms == {}
    assert tokens_of(generate(engine, requests, steps=2)) == tokens_of(lab.reference("cold", requests))


def test_lookup_finds_what_to_verify_while_it_warms_up(lab: Lab):
    """Else nothing would be known of what its verifications take, and none of their code linked."""
    engine = lab.engine(lab.drafter("ngram", chain(3)), control=Adaptive((PLAIN, chain(3))))
    timer = DispatchTimer(engine.scheduler, engine.programs, engine.spec, engine.depth)
    shares = [timer(chain(3), 8)[1] for _ in range(4)]
    assert engine.programs.skipping == {chain(3)}
    assert min(shares) > 0.3
    assert timer(PLAIN, 8)[1] == 1.0


def test_steps_that_verify_nothing_commit_what_plain_ones_do(lab: Lab):
    requests = mixed_requests("mixed")
    control = Cycle((chain(3),))
    outputs = generate(lab.engine(lab.drafter("ngram", chain(3)), rows=1, control=control), requests)
    assert tokens_of(outputs) == tokens_of(lab.reference("mixed", requests))
    skipped, steps = (sum(getattr(o, name) for _, o in control.outcomes) for name in ("skipped", "steps"))
    assert 0 < skipped < steps
    assert 0 < sum(o.skipped_tokens for _, o in control.outcomes) <= skipped


def test_drafts_that_too_few_rows_have_are_left_out_of_the_same_text(lab: Lab):
    requests = mixed_requests("mixed")
    control = Cycle((chain(3),), min_rows=(1, 2, 3))
    outputs = generate(lab.engine(lab.drafter("ngram", chain(3)), control=control), requests, steps=2)
    assert tokens_of(outputs) == tokens_of(lab.reference("mixed", requests))
    for decision, outcome in control.outcomes:
        assert len(outcome.rows_with_drafts) == outcome.steps
        assert outcome.skipped == sum(rows < decision.min_rows for rows in outcome.rows_with_drafts)
        tried = sum(rows for rows in outcome.rows_with_drafts if rows >= decision.min_rows)
        assert tried - outcome.rows <= sum(map(len, outcome.accepted.values())) <= tried, "but for texts that ended"
    assert any(0 < rows < d.min_rows for d, o in control.outcomes for rows in o.rows_with_drafts)
    assert any(rows >= d.min_rows > 1 for d, o in control.outcomes for rows in o.rows_with_drafts)


def test_a_head_is_shown_what_was_kept_for_it_when_it_drafts(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    """Little room or much, the text is the same; of a text that was decoded plainly for long the latest is shown.

    Where there is room for all of it, which is 10 positions here, it drafts the same.
    """
    requests, ends, accepted = mixed_requests("cold"), [], {}
    for room in (4, 12, 256):
        monkeypatch.setattr(engine_module, "RING_SIZE", room)
        control = Cycle((*[PLAIN] * 5, chain(3), chain(3)))
        engine = lab.engine(lab.drafter("mtp", chain(3)), control=control, steps=2, buckets=(32,))
        shown, ran = list[tuple[int, int, int]](), list[tuple[int, int]]()
        show, dispatch = engine.programs.catch_up, engine.programs.dispatch

        def showing(state, row, start, count, shown=shown, show=show):
            shown.append((row, start, count))
            return show(state, row, start, count)

        def running(state, arm, steps, shown=shown, ran=ran, dispatch=dispatch, **how):
            ran.append((arm.max_depth, len(shown)))
            return dispatch(state, arm, steps, **how)

        engine.programs.catch_up, engine.programs.dispatch = showing, running
        assert tokens_of(generate(engine, requests, steps=2)) == tokens_of(lab.reference("cold", requests))
        for (_, before), (depth, after) in pairwise([(0, 0), *ran]):
            assert depth or before == after, "plain decoding shows nothing"
        assert max(count for _, _, count in shown) == min(room, 10), "all of it, or what there is room for"
        first = next(after for depth, after in ran if depth)
        ends.append([(row, start + count) for row, start, count in shown[:first]])
        accepted[room] = [outcome.accepted for _, outcome in control.outcomes]
    assert ends[0] == ends[1] == ends[2] != []
    assert accepted[12] == accepted[256]
    assert any(max(counts, default=0) for found in accepted[12] for counts in found.values())
