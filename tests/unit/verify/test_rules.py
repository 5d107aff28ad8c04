"""Verification rules: exact laws by enumeration of drafts and coins, deterministic walks, whole texts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import init_sampling
from jaxspec.keys import Purpose, gumbel
from jaxspec.protocol import Proposal, Tree
from jaxspec.pytree import replace
from jaxspec.topology import Topology, chain, tree
from jaxspec.verify import rules
from jaxspec.verify.rules import RULES
from jaxspec.verify.walk import usable

EXACT = 2e-6  # float32 sums of a few dozen terms
Conditional = Callable[[tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Language:
    """A random conditional law of the next token given the tokens since the anchor."""

    vocab: int
    seed: int
    zeros: bool = False

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self.seed, self.vocab, len(prefix), *prefix])
        weight = rng.dirichlet(np.ones(self.vocab))
        if self.zeros:
            weight[rng.integers(self.vocab)] = 0
        return weight / weight.sum()


def same(weights: tuple[float, ...]) -> Conditional:
    return lambda prefix: np.asarray(weights)


def path_to(topology: Topology, node: int) -> list[int]:
    path = []
    while node > 0:
        path.insert(0, node)
        node = topology.parents[node]
    return path


def draw_all(topology: Topology, q: Conditional, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every draft, siblings without replacement: tokens [X, N], probability [X], log q [X, N, V]."""
    vocab = len(q(()))
    grown: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for node in range(1, topology.nodes):
        parent = topology.parents[node]
        level = []
        for tokens, weight in grown:
            law = q(tuple(tokens[n - 1] for n in path_to(topology, parent))).copy()
            if not valid[node - 1]:
                level.append(((*tokens, 0), weight))
                continue
            for sibling in topology.children[parent]:
                if sibling < node and valid[sibling - 1]:
                    law[tokens[sibling - 1]] = 0
            law /= law.sum()
            level += [((*tokens, t), weight * law[t]) for t in range(vocab) if law[t] > 0]
        grown = level
    tokens = np.array([t for t, _ in grown], np.int32).reshape(len(grown), -1)
    with np.errstate(divide="ignore"):
        logq = [[np.log(q(tuple(t[path_of(topology, n)]))) for n in range(1, topology.nodes)] for t in tokens]
    return tokens, np.array([w for _, w in grown]), np.array(logq, np.float32)


def path_of(topology: Topology, node: int) -> list[int]:
    """Columns of the drafts that lead to a node's parent."""
    return [n - 1 for n in path_to(topology, topology.parents[node])]


@partial(jax.jit, static_argnums=(0, 1))
def judge(rule: str, topology: Topology, proposal: Proposal, score_BTV, sampling, coin_BT):
    """A verdict with chosen coins, and the law from which the last token would be drawn."""
    laws = []

    def record(prob_BV, sampling, position_B):
        laws.append(prob_BV)
        return jnp.zeros(prob_BV.shape[0], jnp.int32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "uniform", lambda key_BX, position_BT, purpose: coin_BT)
        patch.setattr(rules, "_draw", record)
        length_B = jnp.zeros(coin_BT.shape[0], jnp.int32)
        tree = proposal.tree_of(topology)
        live_BN = usable(proposal, sampling, tree)
        verdict = RULES[rule](proposal, score_BTV, live_BN, sampling, length_B, tree)
    (law_BV,) = laws
    return verdict, law_BV


@dataclass(frozen=True)
class Endings:
    """For every draft [X] and node: how likely the path ends there, and the law of the token behind it."""

    tokens_XN: np.ndarray
    weight_X: np.ndarray
    prob_XT: np.ndarray
    law_XTV: np.ndarray


def endings(
    rule: str,
    topology: Topology,
    p: Conditional,
    drawn,
    *,
    valid: np.ndarray | None = None,
    limit: int = 99,
    point=False,
) -> Endings:
    """Integrates the coins out: the coin at which a node stops being accepted is found by bisection.

    ``valid`` says which nodes are verified, [N], or [X, N] where that depends on the drafts.
    """
    tokens, weight, logq = drawn
    drafts, nodes = tokens.shape[0], topology.nodes
    valid = np.ones(nodes - 1, bool) if valid is None else valid
    with np.errstate(divide="ignore"):
        score = [[np.log(p(tuple(t[[n - 1 for n in path_to(topology, v)]]))) for v in range(nodes)] for t in tokens]
    repeat = partial(np.repeat, repeats=nodes, axis=0)  # row x * nodes + v examines node v of draft x
    valid_XN = np.broadcast_to(valid, tokens.shape)
    proposal = Proposal(repeat(tokens), repeat(valid_XN), None if point else repeat(logq))
    rows = drafts * nodes
    sampling = replace(
        init_sampling(rows, 1), temperature_B=jnp.ones(rows), draft_limit_B=jnp.full(rows, limit, jnp.int32)
    )
    on_path_TT = (topology.path_TJ[..., None] == np.arange(nodes)).any(axis=1)
    accept_all = np.where(on_path_TT, -1.0, np.inf).astype(np.float32)
    depth = np.asarray(topology.depth)

    def ends(own_coin: np.ndarray):
        coins = np.tile(accept_all, (drafts, 1)).reshape(drafts, nodes, nodes)
        coins[:, np.arange(nodes), np.arange(nodes)] = own_coin
        verdict, laws = judge(
            rule, topology, proposal, repeat(np.array(score, np.float32)), sampling, coins.reshape(rows, -1)
        )
        count = np.asarray(verdict.count_B).reshape(drafts, nodes)
        return verdict, np.asarray(laws, np.float64), count == depth + 1

    verdict, laws, reached = ends(np.full((drafts, nodes), -1.0, np.float32))
    check_tokens(topology, tokens, verdict, reached)
    low, high = np.zeros((drafts, nodes), np.float32), np.ones((drafts, nodes), np.float32)
    for _ in range(26):
        middle = (low + high) / 2
        hit = ends(middle)[2]
        low, high = np.where(hit, middle, low), np.where(hit, high, middle)
    accept = np.where(reached & (depth > 0), (low.astype(np.float64) + high) / 2, 0.0)
    accept[:, 0] = 1
    return Endings(tokens, weight, ending_prob(rule, topology, accept), laws.reshape(drafts, nodes, -1))


def check_tokens(topology: Topology, tokens: np.ndarray, verdict, reached: np.ndarray) -> None:
    """Verdicts name the path to each forced node and carry its tokens."""
    path = np.asarray(verdict.path_BT).reshape(*reached.shape, -1)
    out = np.asarray(verdict.token_BT).reshape(*reached.shape, -1)
    for v in range(topology.nodes):
        nodes = path_to(topology, v)
        rows = reached[:, v]
        np.testing.assert_array_equal(path[rows, v, : len(nodes) + 1], np.tile([0, *nodes], (rows.sum(), 1)))
        np.testing.assert_array_equal(out[rows, v, : len(nodes)], tokens[rows][:, [n - 1 for n in nodes]])


def ending_prob(rule: str, topology: Topology, accept: np.ndarray) -> np.ndarray:
    """Probability that the path ends at each node, from that of accepting a node that is examined."""
    refuse = 1 - accept
    prob = np.ones_like(accept)
    for v in range(topology.nodes):
        if rule == "block":  # the deepest node that passes
            prob[:, v] = accept[:, v] * refuse[:, v + 1 :].prod(axis=1)
            continue
        for node in path_to(topology, v):
            older = [s for s in topology.children[topology.parents[node]] if s < node]
            prob[:, v] *= accept[:, node] * refuse[:, older].prod(axis=1)
        prob[:, v] *= refuse[:, list(topology.children[v])].prod(axis=1)
    return prob


def continuations(p: Conditional, prefix: tuple[int, ...], length: int) -> np.ndarray:
    """Law of the next ``length`` tokens behind a prefix, [V] * length."""
    if length == 0:
        return np.ones(())
    law = p(prefix)
    return np.stack([w * continuations(p, (*prefix, t), length - 1) for t, w in enumerate(law)])


def text_law(topology: Topology, p: Conditional, found: Endings) -> np.ndarray:
    """Law of the first K + 1 tokens when the target itself continues behind the committed ones."""
    vocab, depth = len(p(())), topology.max_depth
    behind = cache(lambda prefix: continuations(p, prefix, depth - len(prefix) + 1))
    total = np.zeros((vocab,) * (depth + 1))
    for tokens, weight, prob, law in zip(found.tokens_XN, found.weight_X, found.prob_XT, found.law_XTV, strict=True):
        for v in range(topology.nodes):
            if weight * prob[v] == 0:
                continue
            prefix = tuple(int(tokens[n - 1]) for n in path_to(topology, v))
            for t in range(vocab):
                rest = continuations(p, (*prefix, t), depth - len(prefix)) if p(prefix)[t] == 0 else None
                rest = behind(prefix)[t] / p(prefix)[t] if rest is None else rest
                total[(*prefix, t)] += weight * prob[v] * law[v, t] * rest
    return total


CHAINS = [(2, 1), (4, 2), (2, 3), (3, 3)]
TREES = [(2, (2,)), (4, (3,)), (3, (2, 2)), (4, (2, 1)), (3, (1, 2))]


def limits(topology: Topology) -> Iterator[tuple[np.ndarray, int]]:
    """Which nodes are real proposals, and the deepest that a row allows."""
    everything = np.ones(topology.drafts, bool)
    yield everything, 99
    for depth in range(topology.max_depth):
        yield everything, depth
        cut = everything.copy()
        cut[topology.depth.index(depth + 1, 1) - 1 if topology.is_chain else -1 - depth] = False
        yield cut, 99


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("vocab", "length"), CHAINS)
@pytest.mark.parametrize("rule", ["reject", "block"])
def test_chain_commits_the_targets_law(rule: str, vocab: int, length: int, zeros: bool):
    topology, p, q = (
        chain(length),
        Language(vocab, 1, zeros and vocab > 2),
        Language(vocab, 2, zeros and vocab > 2),
    )
    for valid, limit in limits(topology):
        found = endings(rule, topology, p, draw_all(topology, q, np.ones(length, bool)), valid=valid, limit=limit)
        np.testing.assert_allclose(found.prob_XT.sum(axis=1), 1, atol=EXACT)
        np.testing.assert_allclose(text_law(topology, p, found), continuations(p, (), length + 1), atol=EXACT)


@pytest.mark.parametrize(("vocab", "branching"), TREES, ids=str)
def test_tree_commits_the_targets_law(vocab: int, branching: tuple[int, ...]):
    topology, p, q = tree(branching), Language(vocab, 3, zeros=vocab > 2), Language(vocab, 4)
    for valid, limit in limits(topology):
        found = endings("reject", topology, p, draw_all(topology, q, valid), valid=valid, limit=limit)
        np.testing.assert_allclose(found.prob_XT.sum(axis=1), 1, atol=EXACT)
        np.testing.assert_allclose(
            text_law(topology, p, found), continuations(p, (), topology.max_depth + 1), atol=EXACT
        )


@pytest.mark.parametrize(
    ("rule", "topology", "vocab"),
    [
        ("reject", chain(2), 3),
        ("reject", tree((2, 2)), 2),
        ("reject", tree((2, 1)), 3),
        ("block", chain(3), 3),
    ],
    ids=["reject-chain", "reject-tree22", "reject-tree21", "block-chain"],
)
def test_every_point_mass_draft_commits_the_targets_law(rule: str, topology: Topology, vocab: int):
    p = Language(vocab, 5, zeros=vocab > 2)
    everything = list(product(range(vocab), repeat=topology.drafts))  # equal siblings too
    tokens = np.array(everything, np.int32)
    found = endings(rule, topology, p, (tokens, np.ones(len(tokens)), None), point=True)
    for x in range(len(tokens)):
        one = Endings(*(a[x : x + 1] for a in (found.tokens_XN, found.weight_X, found.prob_XT, found.law_XTV)))
        np.testing.assert_allclose(
            text_law(topology, p, one),
            continuations(p, (), topology.max_depth + 1),
            atol=EXACT,
            err_msg=str(tokens[x]),
        )


@pytest.mark.parametrize(
    ("rule", "length", "accepted"),
    [
        ("reject", 2, 10 / 9),
        ("reject", 3, 38 / 27),
        ("reject", 5, 422 / 243),
        ("block", 2, 11 / 9),
        ("block", 3, 5 / 3),
        ("block", 5, 64 / 27),
    ],
)
def test_expected_accepted_drafts(rule: str, length: int, accepted: float):
    target, draft = same((1 / 3, 2 / 3)), same((2 / 3, 1 / 3))
    found = endings(rule, chain(length), target, draw_all(chain(length), draft, np.ones(length, bool)))
    expected = np.sum(found.weight_X[:, None] * found.prob_XT * np.arange(length + 1))
    assert expected == pytest.approx(accepted, abs=1e-6)


def verdict_of(
    rule: str, tree: Topology | Tree, tokens, score, *, valid=None, limit=99, temperature=0.0, length=0, seed=0
):
    rows = len(tokens)
    sampling = replace(
        init_sampling(rows, 1),
        temperature_B=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), rows),
        draft_limit_B=jnp.broadcast_to(jnp.asarray(limit, jnp.int32), rows),
        key_BX=jnp.stack([jnp.full(rows, seed, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1),
    )
    valid = np.ones(tokens.shape, bool) if valid is None else valid
    length_B = jnp.broadcast_to(jnp.asarray(length, jnp.int32), rows)
    proposal = Proposal(jnp.asarray(tokens), jnp.asarray(valid), None)
    decide = jax.jit(RULES[rule].decide)
    nodes = Tree.of(tree) if isinstance(tree, Topology) else tree
    live_BN = usable(proposal, sampling, nodes)
    return decide(proposal, jnp.asarray(score, jnp.float32), live_BN, sampling, length_B, nodes), sampling


def walk_reference(topology: Topology, drafts, valid, limit: int, target) -> tuple[list[int], list[int]]:
    """Descends to the first usable child that equals the target's token."""
    node, path, tokens = 0, [0], []
    while True:
        tokens.append(int(target[node]))
        fit = [c for c in topology.children[node] if valid[c - 1] and drafts[c - 1] == target[node]]
        if not fit or topology.depth[fit[0]] > limit:
            return path, tokens
        node = fit[0]
        path.append(node)


@pytest.mark.parametrize("rule", ["greedy", "match", "reject", "block"])
@pytest.mark.parametrize("topology", [chain(0), chain(3), tree((1, 2))], ids=["plain", "chain", "tree"])
def test_cold_rows_follow_the_argmax(rule: str, topology: Topology):
    if rule == "block" and not topology.is_chain:
        pytest.skip("block verifies chains")
    rng = np.random.default_rng(0)
    rows, vocab = 200, 3
    drafts = rng.integers(0, vocab, (rows, topology.drafts)).astype(np.int32)  # equal siblings happen
    valid = rng.random(drafts.shape) < 0.9
    limit = rng.integers(0, topology.max_depth + 2, rows)
    score = rng.integers(0, 4, (rows, topology.nodes, vocab))  # ties happen
    verdict, _ = verdict_of(rule, topology, drafts, score, valid=valid, limit=limit)
    for row in range(rows):
        path, tokens = walk_reference(topology, drafts[row], valid[row], limit[row], score[row].argmax(axis=-1))
        assert int(verdict.count_B[row]) == len(path)
        assert verdict.path_BT[row, : len(path)].tolist() == path
        assert verdict.token_BT[row, : len(path)].tolist() == tokens
        assert not np.any(np.asarray(verdict.path_BT[row, len(path) :]))


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_each_row_may_have_a_tree_of_its_own(rule: str):
    """Bitwise what it gets where all rows have that tree."""
    tops = [Topology((-1, 0, 0, 0, 1, 1, 2)), Topology((-1, 0, 0, 1, 1, 2, 2)), Topology((-1, 0, 1, 1, 0, 4, 1))]
    rng, rows, vocab = np.random.default_rng(2), 60, 3
    drafts = rng.integers(0, vocab, (rows, 6)).astype(np.int32)
    score = rng.normal(size=(rows, 7, vocab))
    given = {"valid": rng.random(drafts.shape) < 0.9, "limit": rng.integers(0, 3, rows)}
    given["temperature"] = np.where(np.arange(rows) % 2, 0.7, 0.0)

    def verdict(*each: Topology):
        trees = jax.tree.map(lambda *x: jnp.concatenate(x * (rows // len(each))), *map(Tree.of, each))
        return verdict_of(rule, trees, drafts, score, **given)[0]

    together = verdict(*tops)
    assert len(np.unique(together.count_B)) == 3
    for place, top in enumerate(tops):
        for found, wanted in zip(jax.tree.leaves(together), jax.tree.leaves(verdict(top)), strict=True):
            np.testing.assert_array_equal(found[place::3], wanted[place::3])


@pytest.mark.parametrize("topology", [chain(3), tree((2, 2))], ids=["chain", "tree"])
def test_match_commits_what_plain_sampling_draws(topology: Topology):
    rng = np.random.default_rng(1)
    rows, vocab, length = 64, 5, 17
    score = rng.normal(size=(rows, topology.nodes, vocab))
    drafts = rng.integers(0, vocab, (rows, topology.drafts)).astype(np.int32)
    verdict, sampling = verdict_of("match", topology, drafts, score, temperature=0.7, length=length, seed=3)
    plain = np.zeros((rows, topology.nodes), int)
    noise_of = jax.jit(gumbel, static_argnums=(2, 3))
    for node in range(topology.nodes):
        place = length + topology.depth[node]
        alone, _ = verdict_of(
            "match", chain(0), drafts[:, :0], score[:, node : node + 1], temperature=0.7, length=place, seed=3
        )
        plain[:, node] = np.asarray(alone.token_BT[:, 0])
        noise = noise_of(sampling.key_BX, jnp.full((rows, 1), place + 1, jnp.int32), Purpose.TARGET, vocab)
        wanted = np.argmax(score[:, node].astype(np.float32) + np.asarray(noise)[:, 0], axis=-1)
        np.testing.assert_array_equal(plain[:, node], wanted)
    assert len({tuple(row) for row in plain}) > 20, "rows draw their own noise"
    for row in range(rows):
        path, tokens = walk_reference(topology, drafts[row], np.ones(topology.drafts, bool), 99, plain[row])
        assert verdict.token_BT[row, : int(verdict.count_B[row])].tolist() == tokens
        assert verdict.path_BT[row, : len(path)].tolist() == path
