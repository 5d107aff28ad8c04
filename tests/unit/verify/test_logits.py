"""From raw logits to scores: every feature against numpy, alone and together, never in a neighbour's row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.decode.state import init_sampling
from jaxspec.nn.threshold import find_threshold
from jaxspec.protocol import Sampling, Tree
from jaxspec.pytree import replace
from jaxspec.topology import Topology, chain, tree
from jaxspec.verify.logits import Context, leaves_as_is, process, truncate

VOCAB, STOPS, ANCHOR, MADE = 12, (3, 8), 10, 3  # the anchor's position, and generated tokens up to it
TOPOLOGIES = {"chain": [chain(3)], "tree": [tree((2, 2))], "plain": [chain(0)]}
TOPOLOGIES["trees"] = [tree((2, 2)), Topology((-1, 0, 1, 1, 0, 4, 0)), Topology((-1, 0, 0, 0, 1, 1, 2))]
FEATURES = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "min tokens": {"min_length": ANCHOR + 3},
    "repetition": {"repetition": 1.3},
    "frequency": {"frequency": 0.4},
    "presence": {"presence": -0.7},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-k above the vocabulary": {"temperature": 1.0, "top_k": 50},
    "top-1": {"temperature": 2.0, "top_k": 1},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "tiny top-p": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "min-p of 1": {"temperature": 1.0, "min_p": 1.0},
    "cuts of a greedy row": {"top_k": 2, "top_p": 0.1, "min_p": 0.5},
    "greedy with penalties": {"repetition": 1.2, "presence": 0.3},
    "bias": {"bias": {2: 3.0, 5: -100.0}},
    "allowed": {"bias": {i: -np.inf for i in range(VOCAB) if i not in (1, 4, 9)}},
    "bad word": {"bad_words": [(4, 6)]},
    "bad words of many lengths": {
        "bad_words": [(5,), (0, 1), (7, 7), (2, 3, 4), (3, 3, 3, 9), (3,) * 5 + (10,), (3,) * 9 + (11,)]
    },
    "bad words warm": {"temperature": 0.7, "bad_words": [(n, m) for n in range(0, 12, 2) for m in range(0, 12, 3)]},
    "nothing left": {"bias": {i: -np.inf for i in range(VOCAB) if i != 3}, "min_length": 99},
    "everything": {
        "bias": {1: 2.5, 6: -np.inf, 7: -1.0},
        "bad_words": [(n, m) for n in range(12) for m in range(1, 12, 5)],
        "temperature": 0.8,
        "min_length": ANCHOR + 4,
        "repetition": 1.2,
        "frequency": 0.2,
        "presence": 0.3,
        "min_p": 0.01,
        "top_k": 7,
        "top_p": 0.9,
    },
}
OFF = {"temperature": 0.0, "top_p": 1.0, "repetition": 1.0}


def settings(names: list[str]) -> Sampling:
    base = init_sampling(len(names), len(STOPS) + 1)
    changes = {"stop_BX": jnp.tile(jnp.asarray([[*STOPS, -1]], jnp.int32), (len(names), 1))}
    for key in (
        "temperature",
        "top_p",
        "min_p",
        "top_k",
        "repetition",
        "presence",
        "frequency",
        "min_length",
    ):
        old = getattr(base, f"{key}_B")
        changes[f"{key}_B"] = jnp.asarray([FEATURES[n].get(key, OFF.get(key, 0)) for n in names], old.dtype)
    biases = [FEATURES[n].get("bias", {}) for n in names]
    words = np.full(base.bad_words_BWL.shape, -1, np.int32)
    for row, name in enumerate(names):
        for place, word in enumerate(FEATURES[name].get("bad_words", [])):
            words[row, place, : len(word)] = word[::-1]
    changes |= {"biased_B": jnp.asarray([bool(b) for b in biases]), "bad_words_BWL": jnp.asarray(words)}
    changes |= {"prompt_length_B": jnp.full(len(names), ANCHOR - MADE + 1, jnp.int32)}
    return replace(base, **changes)


def bias_of(names: list[str]) -> jnp.ndarray:
    """Biases; rows that have none keep what an earlier request left there."""
    bias = np.full((len(names), VOCAB), 7.0, np.float32)
    for row, name in enumerate(names):
        if wanted := FEATURES[name].get("bias"):
            bias[row] = [wanted.get(i, 0.0) for i in range(VOCAB)]
    return jnp.asarray(bias)


def inputs(rows: int, topology: Topology) -> tuple[np.ndarray, Context]:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (rows, topology.nodes, VOCAB)).astype(np.float32)
    context = Context(
        jnp.asarray(rng.integers(0, 3, (rows, VOCAB)) * (rng.random((rows, VOCAB)) < 0.4), jnp.int32),
        jnp.asarray(rng.random((rows, VOCAB)) < 0.3),
        jnp.asarray(rng.integers(0, VOCAB, (rows, topology.nodes)), jnp.int32),
        jnp.full(rows, ANCHOR, jnp.int32),
        jnp.asarray(rng.integers(0, VOCAB, (rows, 2 * ANCHOR)), jnp.int32),
    )
    return logits, context


def path_drafts(topology: Topology, node: int, tokens: np.ndarray) -> list[int]:
    found = []
    while node > 0:
        found.append(int(tokens[node]))
        node = topology.parents[node]
    return found


def reference(
    x: np.ndarray, feature: dict, count: np.ndarray, prompt: np.ndarray, drafts: list[int], made: list[int]
) -> np.ndarray:
    """One node's scores in vLLM's order; the drafts on its path count as generated."""
    x, count = x.astype(np.float64), count.astype(np.float64)
    text = [*made, *drafts[::-1]]
    for *rest, last in feature.get("bad_words", []):
        if text[len(text) - len(rest) :] == rest and len(text) >= len(rest):
            x[last] = -np.inf
    x = x + [feature.get("bias", {}).get(i, 0.0) for i in range(VOCAB)]
    for token in drafts:
        count[token] += 1
    # The token sampled here makes the text this long; a stop id may only end a text beyond the minimum.
    if ANCHOR + len(drafts) + 2 <= feature.get("min_length", 0):
        x[list(STOPS)] = -np.inf
    known = (count > 0) | prompt
    repetition = feature.get("repetition", 1.0)
    x = np.where(known, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - feature.get("frequency", 0.0) * count - feature.get("presence", 0.0) * (count > 0)
    temperature = feature.get("temperature", 0.0)
    if temperature == 0:
        return x
    x = x / temperature
    prob = np.exp(x - x.max())
    if "min_p" in feature:
        x = np.where(prob < feature["min_p"], -np.inf, x)
    if "top_k" in feature:
        x = np.where(x < np.sort(x)[::-1][min(feature["top_k"], VOCAB) - 1], -np.inf, x)
    if "top_p" in feature:
        order = np.argsort(-x)
        prob = np.exp(x[order] - x.max())
        prob /= prob.sum()
        before = np.concatenate([[0], np.cumsum(prob)[:-1]])
        x[order[before >= feature["top_p"]]] = -np.inf
    return x


@pytest.mark.parametrize("shape", TOPOLOGIES)
def test_every_feature_equals_numpy(shape: str):
    names = list(FEATURES)
    tops = [TOPOLOGIES[shape][row % len(TOPOLOGIES[shape])] for row in range(len(names))]
    logits, context = inputs(len(names), tops[0])
    trees = jax.tree.map(lambda *x: jnp.concatenate(x), *map(Tree.of, tops)) if shape == "trees" else Tree.of(tops[0])
    # A row of many drafts, all of them and the anchor bad words' beginnings.
    words = context.token_BT.at[names.index("bad word")].set(4).at[names.index("bad words of many lengths")].set(3)
    history = context.history_BS.at[names.index("bad words of many lengths"), : ANCHOR + 1].set(3)
    context = replace(context, token_BT=words, history_BS=history, bias_BV=bias_of(names))
    scores = jax.jit(process)(logits, settings(names), context, trees)
    for row, (name, topology) in enumerate(zip(names, tops, strict=True)):
        for node in range(topology.nodes):
            drafts = path_drafts(topology, node, np.asarray(context.token_BT[row]))
            count, prompt = np.asarray(context.count_BV[row]), np.asarray(context.prompt_BV[row])
            made = np.asarray(context.history_BS[row, ANCHOR - MADE + 1 : ANCHOR + 1]).tolist()
            wanted = reference(logits[row, node], FEATURES[name], count, prompt, drafts, made)
            np.testing.assert_allclose(scores[row, node], wanted, rtol=1e-5, atol=1e-5, err_msg=f"{name}, node {node}")


@pytest.mark.served
def test_a_row_is_bitwise_what_it_is_alone():
    topology, names = chain(3), list(FEATURES)
    logits, context = inputs(len(names), topology)
    context = replace(context, bias_BV=bias_of(names))
    run = jax.jit(process)
    together = np.asarray(run(logits, settings(names), context, Tree.of(topology)))
    nothing = names.index("nothing")
    np.testing.assert_array_equal(together[nothing].view(np.uint32), logits[nothing].view(np.uint32))
    for row, name in enumerate(names):
        quiet = ["nothing"] * len(names)  # the same shape, every other row switched off
        quiet[row] = name
        alone = np.asarray(run(logits, settings(quiet), context, Tree.of(topology)))
        np.testing.assert_array_equal(together[row].view(np.uint32), alone[row].view(np.uint32), err_msg=name)


@pytest.mark.parametrize("feature", ["top-k", "top-p", "min-p"])
def test_the_best_token_survives_ties_and_bans(feature: str):
    logits = np.zeros((1, 1, VOCAB), np.float32)
    logits[0, 0, : VOCAB // 2] = -np.inf
    _, context = inputs(1, chain(0))
    scores = np.asarray(process(jnp.asarray(logits), settings([feature]), context, Tree.of(chain(0))))[0, 0]
    assert np.all(np.isneginf(scores[: VOCAB // 2]))
    assert np.all(scores[VOCAB // 2 :] == 0), "equal scores are kept or dropped together"


def test_only_greedy_rows_without_features_are_left_as_they_are():
    """In such steps the logits themselves are judged; one row that needs more is enough for scores."""
    _, context = inputs(1, chain(3))
    steps = Tree.of(chain(3))
    left = [name for name in FEATURES if leaves_as_is(settings([name]), context, steps)]
    assert left == ["nothing", "cuts of a greedy row"]
    _, two = inputs(2, chain(3))
    assert not leaves_as_is(settings(["nothing", "temperature"]), two, steps)
    masked = replace(context, mask_BTW=jnp.zeros((1, 4, 1), jnp.uint32))
    assert not leaves_as_is(settings(["nothing"]), masked, steps)


NUMBERS = st.one_of(
    st.sampled_from([-np.inf, 0.0, 1.0, 1.5, -1.5]), st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 1000)), min_size=VOCAB, max_size=VOCAB), st.integers(1, 5000))
def test_the_search_finds_what_a_sort_finds(pairs: list[tuple[float, int]], least: int):
    x, weight = np.float32([x for x, _ in pairs]), np.int32([w for _, w in pairs])
    reached = [value for value in x if weight[x >= value].sum() >= least]
    two = jnp.asarray([[x, np.flip(x)]]), jnp.asarray([[weight, np.flip(weight)]]), jnp.full((1, 2), least)
    found = jax.jit(find_threshold)(*two)
    assert found.shape == (1, 2)
    for value in np.asarray(found)[0]:
        if reached:
            assert value == max(reached)
        else:
            assert np.isnan(value)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"top_k_B": 3}, (0, 1, 2, 3)),  # the third and the fourth best are equally good
        ({"top_k_B": 100}, range(7)),
        ({"top_p_B": 0.5}, (0,)),  # exactly reached
        ({"top_p_B": 0.50001}, (0, 1)),
        ({"top_p_B": 0.8}, (0, 1, 2, 3)),
        ({"top_k_B": 2, "top_p_B": 0.66}, (0,)),  # shares among the kept: 2/3, 1/3
        ({"min_p_B": 0.25, "top_p_B": 0.99}, (0, 1, 2, 3)),
    ],
)
def test_cuts_at_their_edges(change: dict[str, float], kept: tuple[int, ...]):
    share = [1 / 2, 1 / 4, 1 / 8, 1 / 8, 1e-30, 1e-31, 1e-32]
    x = jnp.log(jnp.asarray([[[*share, 0.0]] * 2] * 3, jnp.float32))
    base = init_sampling(3, 1)
    base = replace(base, temperature_B=jnp.ones(3), top_p_B=jnp.ones(3), top_k_B=jnp.zeros(3, jnp.int32))
    other = replace(base, **{name: getattr(base, name).at[1].set(value) for name, value in change.items()})
    for rows in (truncate, jax.jit(truncate)):
        found = np.asarray(rows(x, other))
        np.testing.assert_array_equal(found[[0, 2]], x[:2], "neighbors")
        for node in range(2):
            assert list(np.flatnonzero(np.isfinite(found[1, node]))) == list(kept)
