"""Growing text is what decode gives, at every prefix and for every layout, and what is shown of it only grows."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import RequestError
from jaxspec.serve.detokenizer import ByteText, DecodedText, PieceText, common_prefix, detokenizer
from jaxspec.serve.request import Logprob, SamplingParams
from jaxspec.serve.sample import Sample, new_samples
from jaxspec.serve.text import IncrementalText
from tests.unit.serve.layouts import ALL, KNOWN

LETTERS = "ab .'\n x漢é🙂\ufffdThecatis"


def plain_ids(text: Text, words: str) -> list[int]:
    return text.tokenizer(words, add_special_tokens=False)["input_ids"]


@st.composite
def ids_of(draw: st.DrawFn, text: Text, most: int = 24) -> list[int]:
    """Random ids, unknown ones among them, between ids of random texts."""
    size = len(text.tokenizer)
    random = st.lists(st.integers(0, size + 2), max_size=most // 2)
    written = st.text(LETTERS, max_size=most // 4).map(lambda words: plain_ids(text, words))
    return [i for part in draw(st.lists(st.one_of(random, written), min_size=1, max_size=3)) for i in part][:most]


def wanted(text: Text, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    """The right text: decode of all, less what it has in common with decode of the prompt."""
    before, whole = (text.decode(some, skip_special_tokens=skip) for some in (prompt, [*prompt, *ids]))
    return whole[common_prefix(before, whole) :]


def sample_of(text: Text | None, prompt: list[int], params: SamplingParams) -> Sample:
    return new_samples(
        "0", None, prompt, params, lambda p: IncrementalText(text, p, prompt),
        seeds=(0, 0), capacity=10**6, draft_length=4,
    )[0]  # fmt: skip


def run(sample: Sample, ids: list[int], pieces: list[int] | None = None, eos: Sequence[int] = ()) -> list[str]:
    """Texts that a caller sees while ids come in pieces of these sizes."""
    texts, place = [], 0
    for size in [*(pieces or []), *[1] * len(ids)]:
        if place < len(ids) and sample.completion.finish_reason is None:
            sample.take(ids[place : place + size], 0, None, set(eos))
            sample.show()
            texts.append(sample.completion.text)
            place += size
    return texts


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60)
@given(data=st.data())
def test_text_is_what_decode_gives_at_every_prefix(name: str, data: st.DataObject):
    text, skip = ALL[name](), data.draw(st.booleans(), "skip")
    prompt, ids = data.draw(ids_of(text), "prompt"), data.draw(ids_of(text), "ids")
    growing = IncrementalText(text, SamplingParams(skip_special_tokens=skip), prompt)
    shown = []
    for n, token in enumerate(ids, 1):
        growing.add(token)
        assert growing.whole == wanted(text, prompt, ids[:n], skip)
        shown.append(growing.text)
    final = growing.whole
    assert all(b.startswith(a) for a, b in pairwise([*shown, final]))


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=60)
@given(data=st.data())
def test_pieces_of_any_size_and_stop_strings(name: str, data: st.DataObject):
    text = KNOWN[name]()
    prompt, ids = data.draw(ids_of(text), "prompt"), data.draw(ids_of(text).filter(bool), "ids")
    full = wanted(text, prompt, ids)
    cuts = st.lists(st.tuples(st.integers(0, len(full)), st.integers(1, 4)), max_size=3)
    stops = [stop for at, size in data.draw(cuts, "stops") if (stop := full[at : at + size])]
    stops += data.draw(st.sampled_from([[], [], [text.tokenizer.eos_token], ["cat is"]]))
    params = SamplingParams(max_tokens=len(ids), stop=stops, include_stop_str_in_output=data.draw(st.booleans()))
    sample = sample_of(text, prompt, params)
    texts = run(sample, ids, data.draw(st.lists(st.integers(1, 5), max_size=9), "pieces"))
    c = sample.completion
    assert (c.text, c.stop_reason, c.token_ids) == brute_force(text, prompt, ids, params)
    assert all(b.startswith(a) for a, b in pairwise(texts))


def brute_force(
    text: Text, prompt: list[int], ids: list[int], params: SamplingParams
) -> tuple[str, str | None, list[int]]:
    """Decodes everything again for each id and looks for stop strings everywhere."""
    special = text.token_bytes.specials
    for n in range(1, len(ids) + 1):
        seen = wanted(text, prompt, ids[:n])
        for stop in params.stop_strings:
            if stop in special and ids[n - 1] == special[stop]:
                seen = wanted(text, prompt, ids[: n - 1])
                return seen + stop * params.include_stop_str_in_output, stop, ids[:n]
        tokens = detokenizer(text, skip_special_tokens=True)
        tokens.extend([*prompt, *ids[:n]])
        if tokens.incomplete:
            seen = seen[: max(len(seen) - len(tokens.open), 0)]
        hits = [(seen.find(stop), stop) for stop in params.stop_strings if stop in seen]
        if hits:
            place, stop = min(hits)
            return seen[: place + len(stop) * params.include_stop_str_in_output], stop, ids[:n]
    return wanted(text, prompt, ids), None, ids


def ids(text: Text, *words: str) -> list[int]:
    known = text.tokenizer.convert_tokens_to_ids([*words])
    assert text.tokenizer.unk_token_id not in known
    return known


FALLBACK = ALL["byte_fallback"]()


def grown(words: list[str], prompt: list[str], **settings: Any) -> list[tuple[str, str]]:
    """What is shown and what is whole after each token; the stop string at last, if any."""
    growing, out = IncrementalText(FALLBACK, SamplingParams(**settings), ids(FALLBACK, *prompt)), []
    for token in ids(FALLBACK, *words):
        stop = growing.add(token)
        out.append((growing.text, growing.whole))
        if stop is not None:
            return [*out, (stop, "stops")]
    return out


@pytest.mark.parametrize(
    ("words", "prompt", "wanted"),
    [
        # A byte that does not fit spoils the bytes before it, as it does in decode.
        (["<0x0A>", "<0xE2>", "a"], ["a"], [("", "\n"), ("", "\ufffd\ufffd"), ("\ufffd\ufffda", "\ufffd\ufffda")]),
        (["<0xE2>", "<0x82>", "<0xAC>", "a"], ["a"], [("", "\ufffd"), ("", "\ufffd\ufffd"), ("", "€"), ("€a", "€a")]),
        # Spaces belong to the text wherever something comes before them.
        (["▁Paris", "▁is"], ["▁the"], [(" Paris", " Paris"), (" Paris is", " Paris is")]),
        (["▁▁", "a"], ["▁the"], [("  ", "  "), ("  a", "  a")]),
        (["▁the"], ["<s>"], [("the", "the")]),
        # A prompt that ends within a character: all from the first character that became another.
        (["<0x82>", "<0xAC>", "a"], ["b", "<0xE2>"], [("", "\ufffd"), ("", "€"), ("€a", "€a")]),
        (["<0xE2>", "a"], ["b", "<0x0A>"], [("", "\ufffd\ufffd"), ("\ufffd\ufffda", "\ufffd\ufffda")]),
    ],
)
def test_bytes_and_spaces_of_a_sentencepiece_vocabulary(words: list[str], prompt: list[str], wanted: list):
    assert grown(words, prompt) == wanted


def test_a_character_may_come_in_four_tokens():
    text = ALL["byte_level"]()
    emoji = plain_ids(text, "🙃🙂")
    growing = IncrementalText(text, SamplingParams(), text.encode("a"))
    assert len(emoji) > 2
    seen = []
    for token in emoji:
        growing.add(token)
        seen.append(growing.text)
    assert seen[0] == ""
    assert growing.whole == "🙃🙂"
    assert growing.text == "🙃🙂"


def test_what_may_become_a_stop_string_is_held_back():
    params = SamplingParams(stop=["ab.", "b.c", "xx"], max_tokens=7)
    text = ALL["gemma_like"]()
    sample = sample_of(text, ids(text, "▁the"), params)
    assert run(sample, ids(text, "c", "a", "b", "a", "b", ".", "c")) == ["c", "c", "c", "cab", "cab", "cab"]
    assert (sample.completion.stop_reason, sample.completion.finish_reason) == ("ab.", "stop")
    shown = run(sample_of(text, [], changed(params, include_stop_str_in_output=True)), ids(text, "c", "a", "b", "."))
    assert shown == ["c", "ca", "cab", "cab."]
    assert run(sample_of(text, [], changed(params, max_tokens=2)), ids(text, "c", "a")) == ["c", "ca"]


def changed(params: SamplingParams, **settings: Any) -> SamplingParams:
    return SamplingParams(**{**vars(params), **settings})


def test_no_stop_string_ends_within_the_least_tokens():
    text = ALL["gemma_like"]()
    for words, end in ((["ab", "c", "ab", "c"], "ab"), (["<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "a"], "\n")):
        params = SamplingParams(stop=[end], min_tokens=2, max_tokens=len(words))
        sample = sample_of(text, ids(text, "a"), params)
        run(sample, ids(text, *words))
        assert sample.completion.text == ("abc" if end == "ab" else "\n€a")
        assert sample.completion.finish_reason == ("stop" if end == "ab" else "length")


# As vLLM: the token that ends a text is not part of it, unless that is asked for.
@pytest.mark.parametrize(
    ("settings", "text", "reason"),
    [
        ({}, " Paris is", None),
        ({"skip_special_tokens": False}, " Paris<s> is", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, " Paris<s> is</s>", None),
        ({"stop_token_ids": [ids(FALLBACK, "▁is")[0]]}, " Paris", ids(FALLBACK, "▁is")[0]),
        ({"stop_token_ids": ids(FALLBACK, "▁is"), "include_stop_str_in_output": True}, " Paris is", "id"),
        ({"stop": ["<s>"]}, " Paris", "<s>"),
        ({"stop": ["<s>"], "include_stop_str_in_output": True}, " Paris<s>", "<s>"),
        ({"stop": ["<s>"], "skip_special_tokens": False}, " Paris", "<s>"),
        ({"stop": ["s<s> "], "skip_special_tokens": False}, " Pari", "s<s> "),
        ({"stop": ["<s>"], "min_tokens": 2}, " Paris is", None),
        ({"ignore_eos": True}, " Paris is b", None),
    ],
)
def test_the_token_that_ends_a_text(settings: dict, text: str, reason: object):
    sample = sample_of(FALLBACK, ids(FALLBACK, "▁the"), SamplingParams(max_tokens=5, **settings))
    words = ids(FALLBACK, "▁Paris", "<s>", "▁is", "</s>", "▁b")
    run(sample, words, [5], eos=ids(FALLBACK, "</s>"))
    c = sample.completion
    assert (c.text, c.stop_reason) == (text, ids(FALLBACK, "▁is")[0] if reason == "id" else reason)
    assert c.finish_reason == ("length" if settings.get("ignore_eos") else "stop")
    assert c.token_ids == words[: len(c.token_ids)]
    if c.stop_reason is None and c.finish_reason == "stop":
        assert c.token_ids == words[:4], "the id stays"


def test_a_special_token_within_a_stop_string_is_refused():
    with pytest.raises(RequestError, match=r"stop: 'b</s>' has the special token '</s>' .*stop_token_ids"):
        IncrementalText(FALLBACK, SamplingParams(stop=["b</s>"]))
    IncrementalText(FALLBACK, SamplingParams(stop=["b</s>"], skip_special_tokens=False))


def test_log_probabilities_say_their_tokens():
    sample = sample_of(FALLBACK, ids(FALLBACK, "▁the"), SamplingParams(max_tokens=2, logprobs=2))
    some, other = ids(FALLBACK, "▁is", "<0xE2>")
    entries = [{some: Logprob(-1.0, 1), other: Logprob(-2.0, 2)}, {other: Logprob(-1.0, 1), 10**6: Logprob(-3.0, 2)}]
    sample.take([some, other], 0, entries, set())
    assert [[p.decoded_token for p in entry.values()] for entry in entries] == [[" is", "\ufffd"], ["\ufffd", None]]


def test_log_probabilities_of_a_prompt_say_their_tokens():
    prompt = ids(FALLBACK, "▁the", "▁is")
    sample = sample_of(FALLBACK, prompt, SamplingParams(max_tokens=2, prompt_logprobs=0))
    sample.output.prompt_logprobs = [None, {prompt[1]: Logprob(-1.0, 1)}]
    run(sample, prompt)
    entry = sample.output.prompt_logprobs[1]
    assert entry is not None
    assert entry[prompt[1]].decoded_token == " is"


def test_a_text_that_ends_early_shows_all_it_has():
    """What was held back, too: nothing more comes."""
    for end in ("abort", "error"):
        sample = sample_of(FALLBACK, ids(FALLBACK, "▁the"), SamplingParams(stop=["is x"]))
        assert run(sample, ids(FALLBACK, "▁is", "<0x0A>")) == [" ", " "]
        sample.abort() if end == "abort" else sample.fail("why")
        assert (sample.completion.text, sample.completion.finish_reason) == (" is\n", end)


def test_without_a_tokenizer_there_is_no_text():
    sample = sample_of(None, [1], SamplingParams(max_tokens=2))
    assert run(sample, [1, 2]) == ["", ""]
    assert sample.completion.finish_reason == "length"


def test_each_layout_is_known():
    kinds = {"byte_level": ByteText, "tiktoken_like": ByteText, "word_ends": DecodedText}
    for name, make in ALL.items():
        assert type(detokenizer(make(), skip_special_tokens=True)) is kinds.get(name, PieceText), name


class Counted(Text):
    """Counts the ids that are decoded."""

    decoded = 0

    def decode(self, ids, *, skip_special_tokens=True):
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", KNOWN)
def test_known_layouts_decode_nothing_twice(name: str):
    text = Counted(KNOWN[name]().tokenizer)
    growing = IncrementalText(text, SamplingParams(), [3] * 1000)
    for token in range(200):
        growing.add(token % 9 + 1)
    assert growing.whole
    assert text.decoded == 0


def test_a_tokenizer_in_python_is_decoded_each_time():
    text = Text(ByT5Tokenizer())
    prompt, said = text.encode("the")[:-1], text.encode("Grüße 🙂, and more words")
    sample = sample_of(text, prompt, SamplingParams(max_tokens=len(said)))
    texts = run(sample, said)
    assert texts[-1] == "Grüße 🙂, and more words"
    assert texts[20].startswith("Grüße")
    assert all(b.startswith(a) for a, b in pairwise(texts))


def test_a_tokenizer_that_cannot_decode_is_a_request_error():
    class Broken(ByT5Tokenizer):
        def convert_tokens_to_string(self, tokens):
            raise KeyError("no such token")

    sample = sample_of(Text(Broken()), [5], SamplingParams(max_tokens=2))
    sample.take([6], 0, None, set())
    with pytest.raises(RequestError, match=r"text: the tokenizer cannot decode .*no such token"):
        sample.show()
    sample.fail("this text could not be taken over")
    assert (sample.completion.finish_reason, sample.completion.text) == ("error", "")


@given(st.text("ab"), st.text("ab"), st.text("ab"))
def test_shared_counts_the_common_start(start: str, a: str, b: str):
    same = len(start) + next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(start + a, start + b) == same
