"""A token's bytes are its own, whatever the vocabulary's spelling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from jaxspec.checkpoint.text.codec import Text
from jaxspec.checkpoint.text.token_bytes import TokenBytes
from tests.unit.serve.layouts import ALL, KNOWN, byte_fallback

LAYOUTS = {
    "byte_level": "bytes", "tiktoken_like": "bytes", "byte_fallback": "pieces", "gemma_like": "pieces",
    "unigram": "pieces", "word_piece": "pieces", "words": "pieces", "word_ends": "unknown",
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_layouts_are_told_by_their_decoders(name: str):
    text = ALL[name]()
    assert text.token_bytes is text.token_bytes
    assert text.token_bytes.layout == LAYOUTS[name]
    assert text.token_bytes.specials[text.tokenizer.eos_token] == text.tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("name", "token", "data"),
    [
        ("byte_level", "Ġ", b" "),
        ("byte_level", "Ã", b"\xc3"),
        ("tiktoken_like", "Ċ", b"\n"),
        ("byte_level", "<“tool”>", "<“tool”>".encode()),
        ("byte_level", "<think> ", b"<think> "),
        ("byte_fallback", "<0xF0>", b"\xf0"),
        ("byte_fallback", "▁is", b" is"),
        ("gemma_like", "▁▁", b"  "),
        ("byte_fallback", "</s>", b"</s>"),
        ("unigram", "é▁x", "é x".encode()),
        ("word_piece", "##s", b"s"),
        ("word_piece", "cat", b" cat"),
        ("word_piece", "n't", b"n't"),
        ("words", "漢", " 漢".encode()),
        ("word_ends", "b</w>", b"b"),
    ],
)
def test_bytes_of_a_token(name: str, token: str, data: bytes):
    text = ALL[name]()
    token_id = text.tokenizer.convert_tokens_to_ids(token)
    assert text.token_bytes.of(token_id) == data
    assert text.token_bytes.text(token_id) == data.decode(errors="replace")
    assert text.token_bytes.of(len(text.tokenizer) + 1) is None
    assert text.token_bytes.text(len(text.tokenizer) + 1) is None


@pytest.mark.parametrize("name", ["byte_level", "tiktoken_like", "gemma_like"])
@settings(max_examples=60)
@given(words=st.text("ab c漢é🙂\n", max_size=12))
def test_bytes_of_a_text_join_to_it(name: str, words: str):
    text = KNOWN[name]()
    ids = text.tokenizer(words, add_special_tokens=False)["input_ids"]
    joined = b"".join(text.token_bytes.of(i) or b"?" for i in ids)
    assert joined.decode() == text.decode(ids, skip_special_tokens=False)


def decoded_by(*stages: decoders.Decoder) -> TokenBytes:
    tokenizer = byte_fallback().tokenizer
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([*stages])
    return TokenBytes(tokenizer)


def test_decoders_whose_tokens_depend_on_one_another_are_not_taken_apart():
    replace, fuse = decoders.Replace("▁", " "), decoders.Fuse()
    assert decoded_by(replace, fuse).layout == "pieces"
    assert decoded_by(replace, decoders.ByteFallback(), fuse, decoders.Strip(" ", 3, 0)).strip == (" ", 3)
    for stages in (
        [fuse, replace],
        [fuse, decoders.Strip(" ", 0, 1)],
        [decoders.ByteFallback(), decoders.Metaspace()],
        [decoders.Metaspace(), fuse, decoders.Strip(" ", 1, 0)],
        [decoders.ByteLevel(), replace],
        [decoders.CTC()],
    ):
        assert decoded_by(*stages).layout == "unknown", stages


def test_a_class_that_decodes_on_its_own_is_not_taken_apart():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    backend = byte_fallback().tokenizer.backend_tokenizer
    text = Text(Shouting(tokenizer_object=backend, eos_token="</s>"))
    assert text.token_bytes.layout == "unknown"
    token_id = text.tokenizer.convert_tokens_to_ids("▁is")
    assert text.token_bytes.of(token_id) == b" IS"
    assert text.token_bytes.of(text.tokenizer.convert_tokens_to_ids("<0xF0>")) == b"\xf0"


def test_tokenizers_in_python_are_asked():
    text = Text(ByT5Tokenizer())
    assert text.token_bytes.layout == "unknown"
    assert text.token_bytes.of(text.encode("a")[0]) == b"a"
    assert text.token_bytes.specials["</s>"] == 1
    assert text.token_bytes.of(1) == b"</s>"
