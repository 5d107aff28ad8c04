"""The draft vocabulary: the most frequent tokens, as ids, offsets and mask, wrong ones refused; noise of its tokens."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.state import init_sampling
from jaxspec.draft.autoregress import scores
from jaxspec.draft.draft_vocab import expand_to_target_vocab, make_draft_vocab
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


def test_sampled_drafts_are_ranked_with_the_targets_own_noise():
    vocab = make_draft_vocab(np.array([1, 4, 6]), 7)
    logits_BTV = expand_to_target_vocab(jnp.asarray([[[0.5, 2.0, -1.0]], [[1.0, 0.0, 3.0]]]), vocab)
    assert np.isneginf(np.asarray(logits_BTV)[..., [0, 2, 3, 5]]).all()
    key_BX = jnp.asarray([[1, 2], [3, 4]], jnp.uint32)
    sampling = replace(init_sampling(2, 1), temperature_B=jnp.asarray([0.5, 0.0]), key_BX=key_BX)
    length_B = jnp.asarray([3, 9], jnp.int32)
    anchor = Anchor(length_B, length_B, jnp.zeros((2, 1), jnp.int32), sampling)
    drafter: Any = SimpleNamespace(vocab=vocab, logits=lambda last: last)
    score, noisy = scores(drafter, logits_BTV, anchor, jnp.asarray([2], jnp.int32), "match")
    noise = gumbel(key_BX, length_B[:, None] + 2, Purpose.TARGET, 7)
    np.testing.assert_array_equal(score[0], logits_BTV[0] / 0.5)
    np.testing.assert_array_equal(noisy, [logits_BTV[0] / 0.5 + noise[0], logits_BTV[1]])
