"""Tokens that a request bans or favors, as the compiled step takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.checkpoint.text.codec import Text
from jaxspec.decode.state import BAD_WORDS
from jaxspec.errors import RequestError
from jaxspec.serve.request import SamplingParams

Words = tuple[tuple[int, ...], ...]


def bad_word_ids(words: Sequence[str], text: Text | None) -> Words:
    """Tokenizes bad words as vLLM does.

    Each word as it is, and after a space where that gives as many tokens and another first one. Raises
    RequestError if there is no tokenizer, or they are too many or too long.
    """
    if not words:
        return ()
    if text is None:
        raise RequestError("bad_words: the model has no tokenizer; ban tokens with logit_bias or allowed_token_ids")
    sequences: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (_ids(text, space + word.lstrip()) for space in ("", " "))
        sequences += [plain] if plain else []
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    most, longest = BAD_WORDS
    several = [ids for ids in sequences if len(ids) > 1]
    if len(several) > most or any(len(ids) > longest for ids in several):
        raise RequestError(
            f"bad_words: at most {most} sequences of 2 to {longest} tokens, and any number of single tokens, got "
            f"{len(several)} of up to {max(map(len, several))}; leave some out or shorten them"
        )
    return tuple(dict.fromkeys(sequences))


def _ids(text: Text, word: str) -> tuple[int, ...]:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"bad_words: not valid Unicode: {word!r}; remove lone surrogates") from error
    return tuple(text.tokenizer(word, add_special_tokens=False)["input_ids"])


def check_ids(params: SamplingParams, vocab: int) -> None:
    """Refuses biased and allowed ids that are not in the vocabulary; raises RequestError."""
    for name in ("logit_bias", "allowed_token_ids"):
        if wrong := [i for i in getattr(params, name) or () if i >= vocab]:
            raise RequestError(f"{name}: token ids are from 0 to {vocab - 1}, got {wrong[:5]}")


def bias_of(params: SamplingParams, words: Words, vocab: int) -> np.ndarray:
    """Returns what is added to the logits, float32 [V]: -inf for tokens that may never be sampled."""
    single = [ids[0] for ids in words if len(ids) == 1]
    allowed, bias = params.allowed_token_ids, params.logit_bias or {}
    bias_V = np.full(vocab, 0 if allowed is None else -np.inf, np.float32)
    bias_V[allowed if allowed is not None else []] = 0
    bias_V[list(bias)] += np.asarray(list(bias.values()), np.float32)
    bias_V[single] = -np.inf
    return bias_V


def table_of(words: Words) -> np.ndarray:
    """Returns bad words of several tokens, each from its last token backwards, int32 [W, L]; see ``Sampling``."""
    table_WL = np.full(BAD_WORDS, -1, np.int32)
    for index, ids in enumerate(ids for ids in words if len(ids) > 1):
        table_WL[index, : len(ids)] = ids[::-1]
    return table_WL
