"""What every drafter keeps, for everything that the catalog can build."""

from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.draft import methods
from jaxspec.draft.lazy_observer import LazyObserver
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.mtp import Mtp
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.nn.attention import AttentionSpec
from jaxspec.protocol import Commit, DraftCosts, Drafter, Features, Proposal
from jaxspec.pytree import replace
from jaxspec.topology import DynamicTree, Topology
from jaxspec.verify.rules import RULES
from tests.contract.tiny_drafters import (
    BLOCK,
    CAPACITY,
    CASES,
    CONFIG,
    DYNAMIC,
    METHODS,
    ROWS,
    SHAPES,
    VOCAB,
    committed,
    config_of,
    drafter_of,
    drafting,
    features_for,
    head_of,
    model,
    observe,
    observed,
    prediction,
    propose,
)


def slow_unless(quick: bool) -> list[pytest.MarkDecorator]:
    return [] if quick else [pytest.mark.slow]


def is_quick(method: str, shape: dict) -> bool:
    """A chain of one is the chain of four cut short; one walk grows the trees of all drafters."""
    return (shape is not SHAPES[0] and (shape is not DYNAMIC or method == "eagle3")) or method == "none"


each_drafter = pytest.mark.parametrize(
    ("method", "shape"),
    [pytest.param(m, s, id=f"{m}-{next(iter(s.values()))}", marks=slow_unless(is_quick(m, s))) for m, s in CASES],
)


def test_the_catalog_builds_what_it_names():
    built = {type(drafter_of(m, SHAPES[0])).__name__ for m in METHODS}
    assert built == {
        "NoDrafts",
        "Ngram",
        "SmallLm",
        "MtpHeads",
        "HeadDrafter",
        "BlockDrafter",
        "MedusaDrafter",
        "Hybrid",
    }
    assert all(head_of(kind).kind == kind for kind in methods.HEADS)


@each_drafter
def test_it_is_a_pytree_with_a_static_topology(method: str, shape: dict):
    drafter = drafter_of(method, shape)
    leaves, structure = jax.tree.flatten(drafter)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(drafter)
    assert again.topology == drafter.topology
    assert isinstance(drafter.topology, DynamicTree if shape is DYNAMIC else Topology)
    assert hash(structure) == hash(jax.tree.structure(drafter_of(method, shape)))
    assert isinstance(drafter.slack, int)
    for name in ("init_state", "propose", "observe"):
        assert callable(getattr(drafter, name))
    with pytest.raises(AttributeError):
        drafter.topology = None  # pyright: ignore[reportAttributeAccessIssue]


@each_drafter
def test_states_are_arrays_of_the_same_shapes_throughout(method: str, shape: dict):
    drafter = drafter_of(method, shape)
    state, anchor = observed(drafter, (4, 9, 20))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    proposal, after = jax.eval_shape(partial(propose, rule="match"), drafter, state, anchor)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == shapes
    drafts, depth = drafter.topology.drafts, drafter.topology.max_depth + 1
    assert (proposal.token_BN.shape, proposal.token_BN.dtype) == ((ROWS, drafts), jnp.int32)
    assert (proposal.valid_BN.shape, proposal.valid_BN.dtype) == ((ROWS, drafts), jnp.bool_)
    assert (proposal.tree is None) == isinstance(drafter.topology, Topology)
    tree = jax.eval_shape(lambda p: p.tree_of(drafter.topology), proposal)
    assert (tree.nodes, tree.max_depth, tree.is_chain) == (drafts + 1, depth - 1, drafter.topology.is_chain)
    path = jax.ShapeDtypeStruct((ROWS, depth), jnp.int32)
    count = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    stream = jax.ShapeDtypeStruct((ROWS, depth, CONFIG["hidden_size"]), jnp.float32)
    reads = drafter.reads
    features = Features(stream, stream, (stream,) * len(reads.taps), (stream,) * len(reads.shared_outputs))
    commit = Commit(path, path, features, count, count, path, None)
    seen = jax.eval_shape(observe, drafter, after, commit)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), seen) == shapes


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("draft_model", "early_exit")])
def test_nothing_of_an_old_target_stays(method: str):
    drafter, (_, params) = drafter_of(method, SHAPES[1]), model()
    own = {id(leaf) for leaf in jax.tree.leaves(drafting(method))}
    new = drafter.update_target(jax.tree.map(jnp.copy, params))
    old = {id(leaf) for leaf in jax.tree.leaves(params)} - own
    assert not [leaf.shape for leaf in jax.tree.leaves(new) if id(leaf) in old]


@pytest.mark.parametrize("method", [m for m in methods.METHODS if m not in methods.LOOKUP])
def test_chains_with_prices_say_how_sure_they_are(method: str):
    drafter = drafter_of(method, SHAPES[1])
    state, anchor = jax.eval_shape(lambda: observed_shapes(drafter))
    for prices in (None, DraftCosts(*(jnp.float32(0) for _ in range(7)), jnp.ones((2, 4)), experts=4, top_k=2)):
        proposal, after = jax.eval_shape(
            lambda s, a, p: drafter.propose(s, replace(a, draft_costs=p), "reject"), state, anchor, prices
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        assert (proposal.confidence_BN is None) == (prices is None)
        assert proposal.valid_BN.shape == (ROWS, 4)
    assert proposal.confidence_BN.shape == (ROWS, 4)


def observed_shapes(drafter: Drafter):
    """Shapes of what is observed of a prompt."""
    net, params = model()
    state = init_state(Target(params, net, BLOCK), drafter, ROWS, CAPACITY, slack=32)
    return state.draft, state.anchor


WITH_RULES = [(m, s, r) for m, s in CASES for r in ("match", *(("greedy", "reject") if s is SHAPES[1] else ()))]


@pytest.mark.parametrize(
    ("method", "shape", "rule"),
    [
        pytest.param(
            m, s, r, id=f"{m}-{next(iter(s.values()))}-{r}", marks=slow_unless(is_quick(m, s) and r != "greedy")
        )
        for m, s, r in WITH_RULES
    ],
)
def test_proposing_commits_nothing(method: str, shape: dict, rule: str):
    drafter = drafter_of(method, shape)
    lengths = (4, 9, 20)
    state, anchor = observed(drafter, lengths)
    anchor = replace(anchor, sampling=replace(anchor.sampling, temperature_B=jnp.asarray([0.0, 0.7, 1.0])))
    first, after = propose(drafter, state, anchor, rule)
    second, _ = propose(drafter, after, anchor, rule)
    check_equal(first, second)
    anchor_B = np.asarray(lengths) - 1
    for old, new in zip(committed(state, anchor_B), committed(after, anchor_B), strict=True):
        np.testing.assert_array_equal(old, new)
    token = np.asarray(first.token_BN)
    assert ((token >= 0) & (token < VOCAB)).all()
    needs_law = method not in ("none", "ngram", "suffix") and rule == "reject" and shape is not DYNAMIC
    assert (first.logp_BNV is not None) == needs_law
    if needs_law:
        np.testing.assert_allclose(np.exp(np.asarray(first.logp_BNV)).sum(-1), 1, rtol=1e-5)


def check_equal(a: Proposal, b: Proposal) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@each_drafter
def test_a_row_drafts_alike_whatever_its_neighbors(method: str, shape: dict):
    drafter = drafter_of(method, shape)
    here, _ = propose(drafter, *observed(drafter, (4, 9, 20)), "match")
    there, _ = propose(drafter, *observed(drafter, (30, 9, 2)), "match")
    np.testing.assert_array_equal(np.asarray(here.token_BN)[1], np.asarray(there.token_BN)[1])
    np.testing.assert_array_equal(np.asarray(here.valid_BN)[1], np.asarray(there.valid_BN)[1])


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=slow_unless(m in ("none", "ngram", "draft_model", "eagle3"))) for m in METHODS]
)
def test_one_trace_per_program(method: str):
    """Equal kind, rows, topology and rule share one program; other rows or another rule take another."""
    net, params = model()
    target, traces, shape = Target(params, net, BLOCK), [], SHAPES[1]

    def run(target, drafter, state, limit, eager, *, plan):
        traces.append(plan)
        return dispatch(target, drafter, state, limit, eager, plan=plan)

    jitted = jax.jit(run, static_argnames="plan")

    def lower(rows: int, rule: str) -> None:
        drafter = drafter_of(method, shape)  # built anew each time
        state = init_state(target, drafter, rows, CAPACITY, slack=32)
        jax.eval_shape(
            partial(jitted, plan=StepPlan(RULES[rule], 2)), target, drafter, state, jnp.int32(1), jnp.array(False)
        )

    for rows, rule, expected in (
        (3, "match", 1),
        (3, "match", 1),
        (2, "match", 2),
        (3, "greedy", 3),
        (3, "match", 3),
    ):
        lower(rows, rule)
        assert len(traces) == expected


@dataclass(frozen=True)
class Unbranching(AttentionSpec):
    """Attention that cannot verify trees."""

    chain_only = "its attention cannot branch"


def unbranching(arch: ArchSpec) -> ArchSpec:
    spec = Unbranching(**vars(arch.layers[0].attention))
    layers, mtp = (tuple(changed(layer, attention=spec) for layer in part) for part in (arch.layers, arch.mtp))
    return changed(arch, layers=layers, mtp=mtp)


def odd_drafting(method: str) -> Any:
    """What drafts, with attention that cannot verify trees; Medusa and n-grams have none."""
    net, params = model()
    if method == "draft_model":
        return Transformer(unbranching(net.arch), net.policy), params
    if method == "mtp":
        return Mtp(unbranching(net.arch), net.policy), prediction()[1]
    own = drafting(method)
    if isinstance(own, Head) and isinstance(own.net, DraftHead):
        spec = changed(own.net.spec, arch=unbranching(own.net.spec.arch))
        return changed(own, net=DraftHead(spec, own.net.policy))
    return own


@pytest.mark.parametrize("method", [m for m in methods.METHODS if m != "suffix"])  # which drafts chains alone
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_trees_are_refused_where_attention_cannot_branch(method: str, whose: str):
    net, params = model()
    odd = Transformer(unbranching(net.arch), net.policy)
    target = (odd if whose == "target" else net, params)
    build = partial(methods.build, target=target, block=BLOCK, model=odd_drafting(method))
    build(methods.parse(config_of(method, {"num_speculative_tokens": 2})))
    tree = methods.parse(config_of(method, {"speculative_token_tree": [2, 2]}))
    if whose == "draft" and method in ("ngram", "medusa", "early_exit", *methods.BLOCKS):
        assert build(tree).topology == tree.topology
        return
    with pytest.raises(ConfigError, match=r"tree is not possible for .*: its attention cannot branch; use num_spec"):
        build(tree)


@pytest.mark.parametrize(
    "method", ["eagle3", *(pytest.param(m, marks=pytest.mark.slow) for m in ("mtp", "shared_expert"))]
)
def test_what_was_kept_is_observed_later(method: str):
    """A head shown many positions at once, from what plain decoding kept of them, knows what it would have known."""
    net, params = model()
    drafter = drafter_of(method, SHAPES[0])
    text = np.tile(np.random.default_rng(0).integers(1, VOCAB, (ROWS, 3)), (1, 8)).astype(np.int32)
    count = text.shape[1] - 1
    features = features_for(net, params, text[:, :-1], drafter.reads)
    start, every = jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, count, jnp.int32)
    whole = Commit(jnp.asarray(text[:, :-1]), jnp.asarray(text[:, 1:]), features, every, start, None, None)
    wanted = jax.jit(drafter.observe)(drafter.init_state(ROWS, CAPACITY, 32), whole)

    deferred = LazyObserver(drafter, net.arch, ring_size=count + 2)
    plain = jax.jit(deferred.plain().observe)
    state = deferred.init_state(ROWS, CAPACITY, 32)
    first = count // 2  # what was kept before is overwritten where the ring has come round
    for at in [*range(first), *range(count)]:
        one = jax.tree.map(lambda x, at=at: x[:, at : at + 1], (whole.token_BT, whole.next_BT, features))
        state = plain(state, Commit(*one, jnp.ones(ROWS, jnp.int32), start + at, start[:, None], None))
    for row in range(ROWS):
        kept = deferred.replay_features(state, jnp.int32(row), jnp.arange(count, dtype=jnp.int32))
        part = (x[row : row + 1] for x in (whole.token_BT, whole.next_BT))
        shown = Commit(*part, kept, every[:1], start[:1], None, jnp.full(1, row, jnp.int32))
        state = jax.jit(deferred.observe)(state, shown)
    lengths = np.full(ROWS, count)
    for a, b in zip(committed(wanted, lengths), committed(state.draft, lengths), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
