"""The draft vocabulary: the most frequent tokens, as ids, offsets and mask, wrong ones refused; noise of its tokens."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import init_sampling
from jaxspec.draft.draft_scores import score_tokens
from jaxspec.draft.draft_vocab import Candidates, make_draft_vocab
from jaxspec.errors import ConfigError
from jaxspec.keys import Purpose, gumbel
from jaxspec.models.vocab import check_ids, choose_ids, coverage, from_d2t, to_d2t, to_t2d
from jaxspec.protocol import Anchor
from jaxspec.pytree import replace

COUNTS = np.array([0, 5, 2, 0, 9, 2, 1])


@pytest.mark.parametrize(("size", "wanted"), [(1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (6, [0, 1, 2, 4, 5, 6])])
def test_most_frequent_tokens_ascending(size: int, wanted: list[int]):
    ids = choose_ids(COUNTS, size)
    assert ids.tolist() == wanted
    assert ids.dtype == np.int32


def test_coverage_counts_occurrences():
    assert coverage(COUNTS, choose_ids(COUNTS, 2)) == 14 / 19
    assert coverage(COUNTS, choose_ids(COUNTS, 7)) == 1


@pytest.mark.parametrize("size", [0, 8])
def test_size_must_fit(size: int):
    with pytest.raises(ConfigError, match=f"from 1 to the target's 7, got {size}"):
        choose_ids(COUNTS, size)


def test_offsets_and_mask_round_trip():
    ids = choose_ids(COUNTS, 3)
    assert to_d2t(ids).tolist() == [1, 1, 2]
    assert to_d2t(ids).dtype == np.int64
    assert to_t2d(ids, 7).tolist() == [False, True, True, False, True, False, False]
    assert np.array_equal(from_d2t(to_d2t(ids), 7, to_t2d(ids, 7)), ids)
    assert np.array_equal(from_d2t(to_d2t(ids), 7), ids)


WRONG = [
    ([1, 1, 2], 4, None, r"ids from 1 to 4, but the target has 4 tokens"),
    ([-1, 1], 4, None, r"ids from -1 to 2"),
    ([3, 0], 9, None, r"ids must ascend, but 3 at 0 is followed by 1; were offsets"),
    ([1, 0], 9, None, r"ids must ascend"),
    ([1, 1, 2], 7, [1, 1, 0, 0, 1, 0, 0], "disagree about 2 tokens"),
    ([1, 1, 2], 7, [0, 1, 1], r"t2d: \[3\] entries, but the target has 7"),
    ([], 7, None, "a row of integers is needed, at least one"),
]


@pytest.mark.parametrize(("d2t", "vocab", "t2d", "says"), WRONG)
def test_wrong_maps_are_refused(d2t: list[int], vocab: int, t2d: list[int] | None, says: str):
    with pytest.raises(ConfigError, match=says):
        from_d2t(np.array(d2t, np.int64), vocab, None if t2d is None else np.array(t2d, bool))


def test_ids_taken_for_offsets_are_noticed():
    with pytest.raises(ConfigError, match="they are another target's"):
        from_d2t(np.array([1, 4, 5, 6]), 7)
    with pytest.raises(ConfigError, match="a row of integers is needed, at least one, got float32"):
        check_ids(np.ones(3, np.float32), 7)


def anchor_of(sampling: Any, **more: Any) -> Anchor:
    length_B = jnp.asarray([3, 9], jnp.int32)
    return Anchor(length_B, length_B, jnp.zeros((2, 1), jnp.int32), sampling, **more)


KNOWN = {
    "a part of the vocabulary": make_draft_vocab(np.array([1, 4, 6]), 7),
    "candidates of each node": Candidates(jnp.asarray([[[6, 1, 4]], [[0, 5, 2]]], jnp.int32), 7),
}


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("rule", ["greedy", "match", "reject"])
def test_drafts_are_those_of_the_whole_vocabulary_with_all_others_left_out(kind: str, rule: str):
    """The same scores, noise, biases and grammar's masks, token for token."""
    known: Any = KNOWN[kind]
    logits_BTW, rng = jnp.asarray([[[0.5, 2.0, -1.0]], [[1.0, 0.0, 3.0]]]), np.random.default_rng(0)
    every_BTV = known.expand(logits_BTW)
    token = np.broadcast_to(known.token, logits_BTW.shape)
    left_out = np.ones((2, 1, 7), bool)
    np.put_along_axis(left_out, token, False, axis=2)
    assert (np.isneginf(every_BTV) == left_out).all()
    np.testing.assert_array_equal(known.pick(every_BTV), logits_BTW)
    sampling = replace(
        init_sampling(2, 1), temperature_B=jnp.asarray([0.5, 0.0]), key_BX=jnp.asarray([[1, 2], [3, 4]], jnp.uint32),
        biased_B=jnp.asarray([True, True]),
    )  # fmt: skip
    bias_BV = jnp.asarray(rng.normal(size=(2, 7)), jnp.float32).at[0, 4].set(-jnp.inf)
    for mask in (None, jnp.asarray([[0b1010011], [0b0100101]], jnp.uint32)):
        anchor = anchor_of(sampling, bias_BV=bias_BV, mask_BW=mask)
        found, wanted = (
            score_tokens(SimpleNamespace(known=lambda _, k=k: k, logits=lambda x: x), x, anchor, jnp.asarray([1]), rule)
            for k, x in ((known, logits_BTW), (None, every_BTV))
        )
        np.testing.assert_allclose(found.logp(), wanted.score_BTW, rtol=1e-6)
        np.testing.assert_allclose(known.expand(found.noisy()), wanted.noisy(), rtol=1e-6)
        np.testing.assert_array_equal(found.best(), wanted.best())
        if rule == "match":
            noise = gumbel(sampling.key_BX, anchor.length_B[:, None] + 1, Purpose.TARGET, 7)
            np.testing.assert_array_equal(wanted.noisy()[0], wanted.score_BTW[0] + noise[0])
            np.testing.assert_array_equal(wanted.noisy()[1], wanted.score_BTW[1])
        (best, ids), (best_V, ids_V) = (x.best_few(3) for x in (found, wanted))
        np.testing.assert_allclose(best, best_V, rtol=1e-6)
        np.testing.assert_array_equal(ids, ids_V)
        more, ids = found.best_few(5)
        assert np.isneginf(more[..., 3:]).all(), "a tree wider than what is known"
        assert np.isin(ids, np.arange(7)).all()
