"""Plans: the inverted U, error bars, break-even, and the rules of thumb."""

import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.claims import claims
from jaxspec.perf.cost import LayerCost, Mesh, Rates
from jaxspec.perf.drafting import AcceptanceModel, DraftCost
from jaxspec.perf.hardware import load_hardware
from jaxspec.perf.machine import AssumedMachine, assumed_machines, default_mesh
from jaxspec.perf.overlap import AssumedOverlap
from jaxspec.perf.planner import (
    Question,
    fitting_rows,
    nodes,
    option,
    plan,
    plan_batch,
    possible_drafters,
    price_per_million,
)
from scripts.house_report import ROOT
from tests.unit.perf.models import dense_model, routed_model

# Weights cost what they weigh, products matter from about 200 positions on, drafts are free.
MACHINE = Rates(byte_s=1e-9, expert_byte_s=1e-9, flop_s=5e-12, expert_flop_s=5e-12)
BIG = LayerCost(16, 20e6, 20e6, experts=128, top_k=4, expert_bytes=4e6, expert_flops=4e6)
LARGE = {"layers": (BIG,), "head_bytes": 60e6, "head_flops": 60e6, "vocab_size": 1000}


def question(chance: float = 0.8, **changes: object) -> Question:
    model = routed_model(**LARGE)
    made = {
        "model": model, "machines": (AssumedMachine(model, MACHINE, overlap=AssumedOverlap(1.0)),),
        "drafters": (DraftCost("ngram"),), "acceptance": {"ngram": (AcceptanceModel((chance,)),)}, "context": 0,
        "trees": (),
    }  # fmt: skip
    return Question(**{**made, **changes})


def test_a_speedup_is_tokens_over_bytes():
    """One row, one draft: two tokens touch 128 (1 - (124/128)^2) = 7.875 experts, one touches 4."""
    found = option(question(0.5), DraftCost("ngram"), 1, (1,))
    dense, expert = 16 * 20e6 + 60e6, 16 * 4e6
    logits = 8 * 4 * 1000
    cost = (dense + 7.875 * expert + 2 * logits) / (dense + 4 * expert + logits)
    assert found.cost == pytest.approx(cost, rel=1e-3)
    assert found.speedup == pytest.approx(1.5 / cost, rel=1e-3)
    assert found.low == found.high == pytest.approx(found.speedup), "nothing is left open"
    plain_s = (dense + 4 * expert + logits) * 1e-9
    assert found.token_s == pytest.approx(plain_s / found.speedup, rel=1e-3)
    assert found.tok_per_s == pytest.approx(1 / found.token_s)
    assert found.break_even == pytest.approx(cost - 1, rel=1e-2), "one draft commits 1 + a tokens"


def test_the_speedup_is_an_inverted_u_of_the_batch():
    """Small batches pay for new experts, middle ones find all of them loaded, large ones compute (MoESD)."""
    batches = (1, 4, 16, 128, 1024, 1 << 17)
    found = {p.rows: p for p in plan(question(), batches)}
    gains = [found[rows].chains[2].speedup for rows in batches]
    peak = gains.index(max(gains))
    assert batches[peak] == 128
    assert gains[1] < gains[0], "the worst batch for bytes is not the largest"
    assert gains[peak] > 1.5 * gains[0]
    assert gains[-2] < 0.8 * gains[peak]
    assert gains[-1] == pytest.approx(AcceptanceModel((0.8,)).length((1, 1, 1)) / 4, rel=0.01), (
        "four times the products"
    )
    assert found[1 << 17].best.verdict == "no"
    assert found[128].target_efficiency > 0.8 > found[4].target_efficiency
    assert found[128].touched[0] == pytest.approx(128 * (1 - (124 / 128) ** 128))


def test_a_dense_model_falls_with_the_batch():
    model = dense_model(**{**LARGE, "layers": (LayerCost(16, 20e6, 20e6),)})
    q = question(model=model, machines=(AssumedMachine(model, MACHINE),))
    gains = [p.chains[2].speedup for p in plan(q, (1, 4, 16, 64, 256, 1024))]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == pytest.approx(AcceptanceModel((0.8,)).length((1, 1, 1)), rel=0.01)
    assert plan_batch(q, 4).touched == (0, 0)


def test_break_even_is_where_the_speedup_is_one():
    p = plan_batch(question(), 8)
    assert p.break_even is not None
    level, length = p.break_even
    again = option(question(level), DraftCost("ngram"), 8, (1,) * length)
    assert again.speedup == pytest.approx(1.0, abs=1e-6)
    worse = [option(question(level), DraftCost("ngram"), 8, (1,) * k).speedup for k in range(1, 9)]
    assert max(worse) <= 1.0 + 1e-6, "no other length pays below it"


def test_error_bars_span_what_is_assumed():
    hardware, _ = load_hardware("h200", ROOT / "configs" / "hardware")
    model = routed_model(**LARGE)
    q = question(machines=assumed_machines(model, hardware, Mesh()))
    found = option(q, DraftCost("ngram"), 8, (1, 1, 1))
    assert found.low < found.speedup < found.high
    open_too = option(question(machines=q.machines, acceptance={}), DraftCost("ngram"), 8, (1, 1, 1))
    assert open_too.low < found.low, "acceptance is open as well"
    alone = [option(question(machines=(m,)), DraftCost("ngram"), 8, (1, 1, 1)).speedup for m in q.machines]
    assert found.low == pytest.approx(min(alone))
    assert found.high == pytest.approx(max(alone))


def test_verdicts():
    found = option(question(), DraftCost("ngram"), 1, (1,))
    verdict = {(1.1, 1.3): "yes", (0.9, 1.3): "maybe", (0.7, 0.9): "no", (1.0, 1.01): "no"}
    for (low, high), words in verdict.items():
        assert found.__class__(**{**found.__dict__, "low": low, "high": high}).verdict == words


def test_trees_are_chosen_where_they_win_and_are_possible():
    sure = {"ngram": (AcceptanceModel((0.5,), sibling=0.9),)}
    q = question(acceptance=sure, trees=((2, 1), (2, 2)))
    assert plan_batch(q, 64).best.branching in ((2, 1), (2, 2))
    chained = routed_model(**LARGE, chain_only="pools positions")
    refused = question(model=chained, acceptance=sure, trees=((2, 1), (2, 2)))
    assert set(plan_batch(refused, 64).best.branching) == {1}
    assert [nodes(b) for b in ((), (1, 1), (2, 2), (3, 2, 1))] == [1, 3, 7, 16]


def test_drafters_that_a_model_allows():
    assert [d.kind for d in possible_drafters(routed_model())] == ["ngram", "eagle", "medusa"]
    own = routed_model(prediction=dense_model())
    assert [d.kind for d in possible_drafters(own)] == ["ngram", "mtp", "eagle", "medusa"]


def test_default_mesh():
    assert default_mesh(routed_model(), 8) == Mesh(expert=8)
    assert default_mesh(routed_model(), 16) == Mesh(data=2, expert=8)
    assert default_mesh(dense_model(), 8) == Mesh(data=4, tensor=2), "two key heads"


def test_rows_that_fit_and_prices():
    assert fitting_rows(question()) is None
    room = plan_batch(question(), 1).memory.total_bytes
    assert (fitting_rows(question(room_bytes=room * 3)) or 0) > 1
    assert price_per_million(3.6, 1000) == pytest.approx(1.0)


def test_bad_questions():
    with pytest.raises(ConfigError, match="reads up to 4096 tokens, got a context of 9000"):
        question(context=9000)
    with pytest.raises(ConfigError, match="needs a machine, a drafter and lengths"):
        question(drafters=())
    with pytest.raises(ConfigError, match="at least one row"):
        plan_batch(question(), 0)


def test_rules_of_thumb_are_answered_from_the_model():
    hardware, _ = load_hardware("h200x8", ROOT / "configs" / "hardware")
    model, mesh = routed_model(**LARGE), Mesh(expert=8)
    q = question(model=model, machines=assumed_machines(model, hardware, mesh), mesh=mesh)
    found = {claim.rule: claim for claim in claims(q)}
    assert len(found) == 14
    assert {c.verdict for c in found.values()} <= {"holds", "does not hold", "depends"}
    promise = next(c for rule, c in found.items() if "four times" in rule)
    assert promise.verdict == "does not hold"
    assert "= 3.29 tokens" in promise.finding
    assert "ceiling of 3.21 to 3.52" in promise.finding
    rounds = next(c for rule, c in found.items() if "all-to-all" in rule)
    assert "32 collectives per pass" in rounds.finding
    saturated = next(c for rule, c in found.items() if "touches all experts" in rule)
    assert saturated.finding.startswith("95 tokens touch 95 % of 128 experts")
    headroom = next(c for rule, c in found.items() if "products idle" in rule)
    # 512 tokens choose 4 each among 128; two bytes are read per weight, which a token uses for two operations.
    ridge = 989.4e12 * 0.6 / (4.8e12 * 0.75)
    assert f"gives an expert 16 tokens, its products take as long as its bytes at {ridge:.0f}" in headroom.finding
    loses = next(c for rule, c in found.items() if ".75 to .65" in rule)
    assert "from 3.29 to 2.64 (-20%)" in loses.finding


def test_rules_depend_on_the_machine():
    """With free products and bytes alone a large batch pays; where positions cost in proportion it never does."""
    linear = AssumedMachine(routed_model(**LARGE), Rates(position_s=1.0))
    rule = "Above a batch of 16 or 32"
    verdicts = {}
    for name, q in (("bytes", question()), ("linear", question(machines=(linear,)))):
        verdicts[name] = next(c.verdict for c in claims(q) if c.rule.startswith(rule))
    assert verdicts == {"bytes": "does not hold", "linear": "holds"}
