"""Growing text is what decode gives, at every prefix and for every layout, and what is shown of it only grows."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from jaxspec.checkpoint.text import Text
from jaxspec.errors import RequestError
from jaxspec.serve.detokenizer import ByteText, DecodedText, PieceText, detokenizer, shared
from jaxspec.serve.request import CompletionOutput, Logprob, SamplingParams
from jaxspec.serve.rows import Sample, new_samples
from jaxspec.serve.text import Growing
from tests.unit.serve.layouts import ALL, KNOWN

LETTERS = "ab .'\n x漢é🙂\ufffdThecatis"


@st.composite
def ids_of(draw: st.DrawFn, text: Text, most: int = 24) -> list[int]:
    """Random ids, unknown ones among them, between ids of random texts."""
    size = len(text.tokenizer)
    random = st.lists(st.integers(0, size + 2), max_size=most // 2)
    written = st.text(LETTERS, max_size=most // 4).map(lambda t: text.tokenizer(t, add_special_tokens=False)["input_ids"])
    return [i for part in draw(st.lists(st.one_of(random, written), min_size=1, max_size=3)) for i in part][:most]


def wanted(text: Text, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    """The right text: decode of all, less what it has in common with decode of the prompt."""
    before, whole = text.decode(prompt, skip), text.decode([*prompt, *ids], skip)
    return whole[shared(before, whole) :]


def sample_of(text: Text, prompt: list[int], params: SamplingParams) -> Sample:
    return new_samples(
        "0", None, prompt, params, lambda p: Growing(text, p, prompt),
        engine_seed=0, number=0, capacity=10**6, draft_length=4,
    )[0]  # fmt: skip


def run(sample: Sample, ids: list[int], pieces: list[int] | None = None, eos: set[int] = frozenset()) -> list[str]:  # pyright: ignore[reportArgumentType]
    """Texts that a caller sees while ids come in pieces of these sizes."""
    texts, place = [], 0
    for size in [*(pieces or []), *[1] * len(ids)]:
        if place < len(ids) and sample.completion.finish_reason is None:
            sample.take(np.asarray(ids[place : place + size], np.int32), 0, None, eos)
            texts.append(sample.completion.text)
            place += size
    return texts


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60)
@given(data=st.data())
def test_text_is_what_decode_gives_at_every_prefix(name: str, data: st.DataObject):
    text, skip = ALL[name](), data.draw(st.booleans(), "skip")
    prompt, ids = data.draw(ids_of(text), "prompt"), data.draw(ids_of(text), "ids")
    growing = Growing(text, SamplingParams(skip_special_tokens=skip), prompt)
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
        tokens = detokenizer(text, True)
        tokens.extend([*prompt, *ids[:n]])
        if tokens.incomplete:
            seen = seen[: max(len(seen) - len(tokens.open), 0)]
        hits = [(seen.find(stop), stop) for stop in params.stop_strings if stop in seen]
        if hits:
            place, stop = min(hits)
            return seen[: place + len(stop) * params.include_stop_str_in_output], stop, ids[:n]
    return wanted(text, prompt, ids), None, ids
