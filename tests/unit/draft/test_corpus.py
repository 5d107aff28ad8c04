"""Lookup in a corpus and in texts of earlier requests against a plain search."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.corpus import LookupCorpus
from jaxspec.draft.methods import SpeculativeConfig
from jaxspec.draft.ngram import Ngram, PastTexts
from jaxspec.draft.speculation_schedule import SpeculationSchedule
from jaxspec.errors import ConfigError
from jaxspec.serve.corpus_files import load_corpus
from jaxspec.topology import chain
from tests.unit.draft.test_ngram import anchor_of

LONGEST, LENGTH = 5, 4


def longest_match(texts: list[list[int]], suffix: list[int]) -> int:
    """The most last tokens of a suffix that some text has, by trying all of them."""
    most = 0
    for text in texts:
        for end in range(len(text)):
            same = 0
            while same < min(LONGEST, end + 1, len(suffix)) and text[end - same] == suffix[-1 - same]:
                same += 1
            most = max(most, same)
    return most


def follows(texts: list[list[int]], suffix: list[int], size: int, drafts: list[int]) -> bool:
    """Whether some text has the suffix's last tokens and these drafts after them, as far as it goes on."""
    wanted = [*suffix[len(suffix) - size :], *drafts]
    return any(text[i : i + len(wanted)] == wanted for text in texts for i in range(len(text)))


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 5, size).tolist() for size in (1, 2, 40, 90)]


def test_a_corpus_gives_the_longest_match_and_what_followed_it(texts):
    rng = np.random.default_rng(2)
    suffixes = [rng.integers(0, 6, size).tolist() for size in (1, 2, *[LONGEST] * 60)]
    suffixes += [texts[-1][end - LONGEST : end] for end in (LONGEST, 30, 90)]
    suffix_BJ = np.full((len(suffixes), LONGEST), -1, np.int32)
    for row, suffix in enumerate(suffixes):
        suffix_BJ[row, : len(suffix)] = suffix[::-1]
    step_N = 1 + jnp.arange(LENGTH, dtype=jnp.int32)[None]
    corpus = LookupCorpus.of(texts, LONGEST)
    size_B, token_BN = jax.jit(lambda c, s: c.continuation(s, step_N))(corpus, jnp.asarray(suffix_BJ))
    assert size_B.tolist() == [longest_match(texts, suffix) for suffix in suffixes]
    assert max(size_B.tolist()) == LONGEST
    for suffix, size, tokens in zip(suffixes, size_B.tolist(), token_BN.tolist(), strict=True):
        drafts = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        assert size == 0 or follows(texts, suffix, size, drafts)


def test_past_texts_are_a_ring_and_the_latest_of_the_longest_matches_counts():
    drafter = Ngram(chain(LENGTH), LONGEST, 2, past_tokens=24, spec_factor=1.0)
    remember, propose = jax.jit(drafter.remember), jax.jit(lambda s, a: drafter.propose(s, a, "match")[0])
    state: PastTexts = drafter.init_state(1, 48, 0)
    assert not propose(state, anchor_of([[7, 8, 9]])).valid_BN.any()
    for text in ([7, 8, 9, 1, 2, 3, 4, 5], [7, 8, 9, 6, 6, 6, 6]):
        state = remember(state, jnp.asarray(np.pad(text, (0, 20))), jnp.int32(len(text)))
    proposal = propose(state, anchor_of([[7, 8, 9]]))
    assert proposal.token_BN[0, :3].tolist() == [6, 6, 6]
    assert proposal.valid_BN[0].tolist() == [True, True, True, False]  # as many as matched
    # A text longer than the ring leaves its end, and nothing else.
    long = np.arange(100, 128)
    state = remember(state, jnp.asarray(long), jnp.int32(28))
    assert not propose(state, anchor_of([[7, 8, 9]])).valid_BN.any()
    assert not propose(state, anchor_of([[101, 102, 103]])).valid_BN.any()
    assert propose(state, anchor_of([[104, 105]])).token_BN[0, :2].tolist() == [106, 107]
    assert not propose(state, anchor_of([[126, 127]])).valid_BN.any()  # after the newest token comes nothing


def test_the_own_text_wins_among_equals(texts):
    own = [1, 2, 3, 9, 1, 2, 3]
    alone, both = (Ngram(chain(2), LONGEST, 2, corpus=c) for c in (None, LookupCorpus.of([[1, 2, 3, 4, 4]], LONGEST)))
    for drafter in (alone, both):
        proposal, _ = drafter.propose((), anchor_of([own]), "match")
        assert proposal.token_BN[0, 0] == 9
    proposal, _ = both.propose((), anchor_of([[8, 1, 2, 3]]), "match")
    assert proposal.token_BN[0].tolist() == [4, 4]


def config(*names: Path) -> SpeculativeConfig:
    return SpeculativeConfig("ngram", SpeculationSchedule(chain(2)), corpus=tuple(map(str, names)))


def test_files_that_do_not_fit_are_named(tmp_path):
    ids, text = tmp_path / "ids.npy", tmp_path / "text.txt"
    np.save(ids, np.array([1, 2, 300]))
    text.write_text("hello")
    assert load_corpus(config(), tmp_path, 10) is None
    for name, size, why in (
        (ids, 10, "from 0 to 9, got int64 .3,. from 1 to 300"), (tmp_path / "no.npy", 10, "No such file"),
        (text, 10, "no tokenizer"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            load_corpus(config(name), tmp_path, size)
    assert load_corpus(config(ids), tmp_path, 301).token_L.tolist() == [1, 2, 300, -1]
