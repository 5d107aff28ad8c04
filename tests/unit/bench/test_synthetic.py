"""Synthetic acceptance: the rates that were decreed come out, and nobody gets them by mistake."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench.synthetic import Synthetic
from jaxspec.decode.state import init_sampling
from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.protocol import Proposal, Tree
from jaxspec.pytree import replace
from jaxspec.topology import chain
from jaxspec.verify.walk import usable

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def test_length_has_the_least_variance():
    assert Synthetic(length=2.25).survival(3) == (1.0, 0.25, 0.0)
    assert Synthetic(length=1.0).survival(2) == (0.0, 0.0)
    assert Synthetic(length=4.0).survival(3) == (1.0, 1.0, 1.0)
    assert Synthetic(rates=(0.8, 0.5, 0.1)).survival(2) == (0.8, 0.5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "one of them"),
        ({"rates": (0.5,), "length": 2.0}, "one of them"),
        ({"rates": (0.5, 0.6)}, "never rise"),
        ({"rates": (1.5,)}, "from 0 to 1"),
        ({"length": 0.5}, "at least 1"),
        ({"length": float("inf")}, "at least 1"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(settings: dict, why: str):
    with pytest.raises(ConfigError, match=why):
        Synthetic(**settings)


def test_too_few_drafts_are_refused():
    with pytest.raises(ConfigError, match="at most 3 tokens"):
        Synthetic(length=3.5).check(2)
    with pytest.raises(ConfigError, match="1 rates for 2 drafts"):
        Synthetic(rates=(0.5,)).check(2)


def test_only_an_object_switches_it_on():
    decreed = Synthetic(length=2.5)
    assert decreed.survival(3) == (1.0, 0.5, 0.0)
    assert methods.parse({**NGRAM, "rejection_sample_method": decreed.rule}).rule == decreed.rule
    with pytest.raises(ConfigError, match="not the model's; only jaxspec bench"):
        methods.parse({**NGRAM, "rejection_sample_method": "synthetic"})
    tree = {"method": "ngram", "speculative_token_tree": [2, 1], "rejection_sample_method": Synthetic(length=2.0).rule}
    with pytest.raises(ConfigError, match="for chains"):
        methods.parse(tree)


def test_rule_keeps_the_rates():
    """8 000 rows; a share's standard error is at most .0056, so 5 of them are .028."""
    rows, drafts, vocab, rates = 8_000, 3, 8, (0.9, 0.5, 0.2)
    rng = np.random.default_rng(0)
    token_BN = jnp.asarray(rng.integers(0, vocab, (rows, drafts)), jnp.int32)
    score_BTV = jnp.asarray(rng.normal(size=(1, drafts + 1, vocab)).repeat(rows, 0), jnp.float32)
    sampling = init_sampling(rows, 1)
    keys = jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))
    limit_B = jnp.asarray([drafts] * (rows - 1) + [1], jnp.int32)
    sampling = replace(sampling, key_BX=keys, draft_limit_B=limit_B)
    proposal = Proposal(token_BN, jnp.ones((rows, drafts), bool).at[0, 1].set(False), None)
    tree, decide = Tree.of(chain(drafts)), Synthetic(rates).rule
    run = jax.jit(lambda p, x, s: decide(p, x, usable(p, s, tree), s, jnp.full(rows, 7, jnp.int32), tree))
    verdict = run(proposal, score_BTV, sampling)
    accepted = np.asarray(verdict.count_B) - 1
    for place, rate in enumerate(rates):
        assert np.mean(accepted > place) == pytest.approx(rate, abs=0.028)
    assert accepted[0] <= 1, "an invalid draft ends the prefix"
    assert accepted[-1] <= 1, "so does the row's own limit"
    best, token, drafted = (np.asarray(x) for x in (jnp.argmax(score_BTV, -1), verdict.token_BT, token_BN))
    for row in range(50):
        n = accepted[row]
        assert token[row, :n].tolist() == drafted[row, :n].tolist()
        assert token[row, n] == best[row, n], "after the drafts comes the target's own token"
