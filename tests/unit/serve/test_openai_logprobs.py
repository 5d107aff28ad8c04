"""OpenAI's log-probability objects: an entry for each id, a token's real bytes, and where its text begins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.serve.openai import CHAT, COMPLETIONS, chat_logprobs, completion_logprobs, response_body
from jaxspec.serve.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
from jaxspec.serve.text import token_offsets
from tests.unit.serve.layouts import ALL, KNOWN
from tests.unit.serve.test_text_growing import FALLBACK, ids, ids_of, plain_ids, wanted


def completion(text: str, token_ids: list[int], *entries: dict[int, float]) -> CompletionOutput:
    """A finished sample; without entries each token is its place's only one."""
    places = entries or [{i: -0.5} for i in token_ids]
    logprobs = [{i: Logprob(p, rank) for rank, (i, p) in enumerate(entry.items(), 1)} for entry in places]
    return CompletionOutput(0, text, token_ids, [False] * len(token_ids), -1.0, logprobs, "stop")


def test_tokens_show_their_spaces_and_where_they_begin():
    words = ids(FALLBACK, "▁Paris", "▁is", "▁b", "</s>")
    answer = completion_logprobs(
        completion(" Paris is b", words), ids(FALLBACK, "▁the"), skip_special_tokens=True, text=FALLBACK
    )
    assert answer is not None
    assert answer["tokens"] == [" Paris", " is", " b", "</s>"]
    assert answer["text_offset"] == [0, 6, 9, 11]
    assert answer["token_logprobs"] == [-0.5] * 4
    assert answer["top_logprobs"][1] == {" is": -0.5}


def test_ids_that_read_alike_keep_an_entry_each():
    first, second, third = ids(FALLBACK, "<0xF0>", "<0xE2>", "▁is")
    c = completion("", [first], {first: -0.1, second: -3.0, third: -4.0})
    answer = completion_logprobs(c, [], skip_special_tokens=True, text=FALLBACK)
    assert answer is not None
    assert answer["top_logprobs"] == [{"bytes:\\xf0": -0.1, "bytes:\\xe2": -3.0, " is": -4.0}]
    assert answer["tokens"] == ["bytes:\\xf0"]


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_text_of_several_ids_names_the_generated_one(chosen: int):
    """The byte token of a letter, and the letter."""
    both = ids(FALLBACK, "a", "<0x61>")
    c = completion("a", [both[chosen]], {both[0]: -0.5, both[1]: -1.0, 10**6: -2.0})
    answer = completion_logprobs(c, [], skip_special_tokens=True, text=FALLBACK)
    assert answer is not None
    named = {f"token_id:{i}": p for i, p in zip(both, [-0.5, -1.0], strict=True) if i != both[chosen]}
    assert answer["top_logprobs"] == [{"a": [-0.5, -1.0][chosen], "token_id:1000000": -2.0} | named]
    assert answer["tokens"] == ["a"]


def test_no_entry_is_lost_in_any_vocabulary():
    for name, make in ALL.items():
        text = make()
        entry = {i: -float(i + 1) for i in range(len(text.tokenizer) + 3)}
        answer = completion_logprobs(completion("", [7], entry), [], skip_special_tokens=True, text=text)
        assert answer is not None
        assert sorted(answer["top_logprobs"][0].values()) == sorted(entry.values()), name
        assert answer["top_logprobs"][0][answer["tokens"][0]] == -8.0


def test_bytes_of_a_characters_tokens_join_to_it():
    for name in ("byte_level", "tiktoken_like", "byte_fallback"):
        text = KNOWN[name]()
        fallback = [f"<0x{byte:02X}>" for byte in "🙃".encode()]
        emoji = ids(text, *fallback) if name == "byte_fallback" else plain_ids(text, "🙃")
        answer = chat_logprobs(completion("🙃", emoji), 1, text)
        assert answer is not None
        assert bytes(b for token in answer["content"] for b in token["bytes"]) == "🙃".encode()
        assert answer["content"][0]["bytes"][0] == 0xF0
        assert answer["content"][0]["token"].startswith("\\xf0")
        assert answer["content"][0]["top_logprobs"] == [
            {key: value for key, value in answer["content"][0].items() if key != "top_logprobs"}
        ]


def test_ids_without_a_tokenizer_or_beyond_it():
    c = completion("", [5, 10**6])
    answer, talk = completion_logprobs(c, [1], skip_special_tokens=True, text=None), chat_logprobs(c, 0, FALLBACK)
    assert answer is not None
    assert answer["tokens"] == ["token_id:5", "token_id:1000000"]
    assert answer["text_offset"] == [0, 0]
    assert talk is not None
    assert [(t["token"], t["bytes"], t["top_logprobs"]) for t in talk["content"]] == [
        ("\x02", [2], []), ("token_id:1000000", None, []),
    ]  # fmt: skip
    assert completion_logprobs(CompletionOutput(0), [], skip_special_tokens=True, text=FALLBACK) is None
    assert chat_logprobs(CompletionOutput(0), 0, FALLBACK) is None


@pytest.mark.parametrize(
    ("words", "prompt", "skip", "offsets"),
    [
        # Parts of a character begin where it does.
        (["<0xE2>", "<0x82>", "<0xAC>", "a"], ["a"], True, [0, 0, 0, 1]),
        # A run of bytes with one that does not fit is a U+FFFD each.
        (["<0x0A>", "<0xE2>", "a"], ["a"], True, [0, 1, 2]),
        (["<0x0A>", "<0x0A>", "▁is"], ["a"], True, [0, 1, 2]),
        # Special tokens have no width where they are left out.
        (["<s>", "a", "<s>", "b"], ["a"], True, [0, 0, 1, 1]),
        (["<s>", "a", "<s>", "b"], ["a"], False, [0, 3, 4, 7]),
        # The first space of a whole text is dropped, in one of a prompt it stays.
        (["▁the", "▁is"], ["<s>"], True, [0, 3]),
        (["▁the", "▁is"], ["a"], True, [0, 4]),
        # A prompt that ended within a character.
        (["<0x82>", "<0xAC>", "a"], ["a", "<0xE2>"], True, [0, 0, 1]),
        (["<0xE2>", "a"], ["a", "<0x0A>"], True, [1, 2]),
    ],
)
def test_offsets_of_a_sentencepiece_vocabulary(words: list[str], prompt: list[str], skip: bool, offsets: list[int]):
    assert (
        token_offsets(FALLBACK, skip_special_tokens=skip, prompt=ids(FALLBACK, *prompt), ids=ids(FALLBACK, *words))
        == offsets
    )


def test_offsets_of_parts_of_characters_in_a_byte_level_vocabulary():
    text = KNOWN["byte_level"]()
    emoji, letter = plain_ids(text, "🙃"), plain_ids(text, "a")
    assert token_offsets(text, skip_special_tokens=True, prompt=letter, ids=[*emoji, *letter]) == [*[0] * len(emoji), 1]
    # A character that breaks off is one U+FFFD.
    assert token_offsets(text, skip_special_tokens=True, prompt=letter, ids=[emoji[0], *letter, *letter]) == [0, 1, 2]
    assert token_offsets(text, skip_special_tokens=True, prompt=[*letter, emoji[0]], ids=[*emoji[1:], *letter]) == [
        *[0] * (len(emoji) - 1),
        1,
    ]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60)
@given(data=st.data())
def test_each_tokens_text_stands_at_its_offset(name: str, data: st.DataObject):
    text, skip = ALL[name](), data.draw(st.booleans(), "skip")
    prompt, token_ids = data.draw(ids_of(text), "prompt"), data.draw(ids_of(text), "ids")
    whole, offsets = (
        wanted(text, prompt, token_ids, skip),
        token_offsets(text, skip_special_tokens=skip, prompt=prompt, ids=token_ids),
    )
    assert len(offsets) == len(token_ids)
    assert offsets == sorted(offsets)
    assert all(0 <= place <= len(whole) for place in offsets)
    if not text.decode(prompt, skip_special_tokens=skip) or "\ufffd" in whole or name == "word_ends":
        return  # the first token may be written otherwise, and what does not fit spoils its neighbors
    for token, place in zip(token_ids, offsets, strict=True):
        own = text.token_bytes.of(token)
        if own is None or (skip and text.token_bytes.is_special(token)):
            continue
        if "\ufffd" not in own.decode(errors="replace"):  # or it is a part of a character
            assert whole.startswith(own.decode(), place)


def test_bodies_carry_them():
    words = ids(FALLBACK, "▁Paris", "</s>")
    c = completion(" Paris", words)
    output = RequestOutput("0", "the", ids(FALLBACK, "▁the"), [c], True)
    body = response_body(COMPLETIONS, 0, "m", output, SamplingParams(logprobs=1), FALLBACK)
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 6]
    body = response_body(CHAT, 0, "m", output, SamplingParams(logprobs=1), FALLBACK)
    assert [t["bytes"] for t in body["choices"][0]["logprobs"]["content"]] == [list(b" Paris"), list(b"</s>")]
