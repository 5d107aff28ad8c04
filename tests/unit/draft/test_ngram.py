"""Prompt lookup against a plain search through the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import init_sampling
from jaxspec.draft.ngram import Ngram
from jaxspec.protocol import Anchor
from jaxspec.topology import Topology, chain, tree

CAPACITY = 48


def anchor_of(texts: list[list[int]]) -> Anchor:
    """Histories whose unused places hold tokens that would match if they were looked at."""
    history = np.ones((len(texts), CAPACITY), np.int32)
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    last = [text[-1] for text in texts]
    length = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    return Anchor(jnp.asarray(last, jnp.int32), length, jnp.asarray(history), init_sampling(len(texts), 1))


def proposals(drafter: Ngram, texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    proposal, _ = jax.jit(lambda anchor: drafter.propose((), anchor, "match"))(anchor_of(texts))
    assert proposal.logp_BNV is None
    return np.asarray(proposal.token_BN), np.asarray(proposal.valid_BN)


def ends_of_matches(text: list[int], suffix: list[int], drafter: Ngram) -> list[int]:
    """Places before the anchor that end like the suffix, longest and then latest first."""
    found = []
    for end in range(len(text) - 1):
        same = 0
        while same < min(drafter.longest, end + 1, len(suffix)) and text[end - same] == suffix[-1 - same]:
            same += 1
        if same >= drafter.shortest:
            found.append((same, end))
    return [end for _, end in sorted(found, reverse=True)]


def lookup(text: list[int], drafter: Ngram) -> list[int] | None:
    """What followed the best match; past the end the matched stretch repeats."""
    ends = ends_of_matches(text, text, drafter)
    if not ends:
        return None
    grown = list(text)
    for n in range(drafter.topology.drafts):
        grown.append(grown[ends[0] + 1 + n])
    return grown[len(text) :]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    sizes = [1, 2, 3, *rng.integers(4, CAPACITY - 6, 197)]
    return [rng.integers(0, rng.integers(2, 8), size).tolist() for size in sizes]


@pytest.mark.parametrize(("longest", "shortest", "length"), [(4, 2, 5), (3, 1, 1), (2, 2, 4)])
def test_chain_equals_plain_lookup(texts: list[list[int]], longest: int, shortest: int, length: int):
    drafter = Ngram(chain(length), longest=longest, shortest=shortest)
    tokens, valid = proposals(drafter, texts)
    found = 0
    for row, text in enumerate(texts):
        wanted = lookup(text, drafter)
        assert valid[row].tolist() == [wanted is not None] * length
        if wanted is not None:
            assert tokens[row].tolist() == wanted
            found += 1
    assert 50 < found < len(texts)


def test_repetition_continues_past_the_end():
    tokens, valid = proposals(Ngram(chain(5)), [[5, 6, 7, 5, 6], [4, 4, 4], [1, 2, 3, 4, 5]])
    assert tokens[0].tolist() == [7, 5, 6, 7, 5]
    assert tokens[1].tolist() == [4, 4, 4, 4, 4]
    assert valid.all(axis=1).tolist() == [True, True, False]


def children_of(text: list[int], path: list[int], drafter: Ngram) -> list[int]:
    """Distinct followers of the best matches of the text with the path behind it."""
    found: list[int] = []
    for end in ends_of_matches(text, [*text, *path], drafter):
        if text[end + 1] not in found:
            found.append(text[end + 1])
    return found


@pytest.mark.parametrize(
    "topology", [tree((2,)), tree((3, 2)), Topology((-1, 0, 0, 1, 3, 2))], ids=["2", "32", "uneven"]
)
def test_tree_children_are_the_best_distinct_followers(texts: list[list[int]], topology: Topology):
    drafter = Ngram(topology, longest=3, shortest=1)
    tokens, valid = proposals(drafter, texts)
    distinct = 0
    for row, text in enumerate(texts):
        for node, children in enumerate(topology.children):
            if node and not valid[row, node - 1]:
                assert not any(valid[row, child - 1] for child in children), "below nothing there is nothing"
                continue
            path, step = [], node
            while step > 0:
                path.insert(0, int(tokens[row, step - 1]))
                step = topology.parents[step]
            wanted = children_of(text, path, drafter)[: len(children)]
            proposed = [int(tokens[row, child - 1]) for child in children if valid[row, child - 1]]
            assert proposed == wanted
            distinct += len(proposed) > 1
    assert distinct > 50
