"""What a request bans or favors becomes what vLLM's rules say: token sequences, biases and a table."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jaxspec.checkpoint.text.codec import Text
from jaxspec.decode.state import BAD_WORDS
from jaxspec.errors import RequestError
from jaxspec.serve.bans import bad_word_ids, bias_of, check_ids, table_of
from jaxspec.serve.request import SamplingParams

PIECES = {" cat": 1, "cat": 2, "c": 3, "a": 4, "t": 5, " ": 6, "dog": 7, "s": 8}


def text() -> Text:
    """A tokenizer that takes the longest piece; special tokens only where they are asked for."""

    def encode(word: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [0] if add_special_tokens else []
        while word:
            piece = max((p for p in PIECES if word.startswith(p)), key=len)
            ids, word = [*ids, PIECES[piece]], word[len(piece) :]
        return {"input_ids": ids}

    return cast(Text, SimpleNamespace(tokenizer=encode))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], ()),
        (["cat"], ((2,), (1,))),  # with and without the space before it
        ([" cat"], ((2,), (1,))),  # a space of its own makes no difference
        (["dog"], ((7,),)),  # " dog" is two tokens, and banning them would ban more than the word
        (["cats"], ((2, 8), (1, 8))),
        (["cat", "cat"], ((2,), (1,))),
        (["s", "cats"], ((8,), (2, 8), (1, 8))),
    ],
)
def test_bad_words_are_tokenized_as_vllm_does(words: list[str], wanted: Any):
    assert bad_word_ids(words, text()) == wanted


def test_bad_words_beyond_the_places_are_refused():
    most, longest = BAD_WORDS
    assert len(bad_word_ids(["s" * n for n in range(1, longest + 1)], text())) == longest
    with pytest.raises(RequestError, match=rf"bad_words: at most {most} sequences of 2 to {longest} tokens"):
        bad_word_ids(["s" * (longest + 1)], text())
    letters = [a + b + c + d for a in "cats" for b in "cats" for c in "cats" for d in "cats"]
    with pytest.raises(RequestError, match=r"bad_words: at most .* got \d+ of up to 4"):
        bad_word_ids(letters, text())
    with pytest.raises(RequestError, match="no tokenizer; ban tokens with logit_bias"):
        bad_word_ids(["a"], None)
    with pytest.raises(RequestError, match="not valid Unicode"):
        bad_word_ids(["\ud800"], text())


def test_the_bias_of_everything_together():
    params = SamplingParams(allowed_token_ids=[1, 3, 5], logit_bias={3: 2.5, 4: 9, 5: -1}, bad_words=["a"])
    bias = bias_of(params, ((1,), (3, 4)), 6)
    np.testing.assert_array_equal(bias, np.float32([-np.inf, -np.inf, -np.inf, 2.5, -np.inf, -1]))
    np.testing.assert_array_equal(bias_of(SamplingParams(logit_bias={2: 1}), (), 3), np.float32([0, 0, 1]))


def test_the_table_runs_backwards_and_leaves_single_tokens_out():
    table = table_of(((9,), (1, 2, 3), (4, 5)))
    assert table.shape == BAD_WORDS
    assert table[:3, :4].tolist() == [[3, 2, 1, -1], [5, 4, -1, -1], [-1] * 4]
    assert (table[3:] == -1).all()


def test_ids_beyond_the_vocabulary_are_refused():
    check_ids(SamplingParams(logit_bias={9: 1}, allowed_token_ids=[9]), 10)
    for name, value in (("logit_bias", {10: 1}), ("allowed_token_ids", [3, 10])):
        with pytest.raises(RequestError, match=rf"{name}: token ids are from 0 to 9, got \[10\]"):
            check_ids(SamplingParams(**{name: value}), 10)
