"""Workloads: seeded, of the length that is asked for, and refused with a reason."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from jaxspec.bench.workload import HELD_OUT, WORKLOADS, PromptSource, load_excerpts, settings
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError

VOCAB = 96


@pytest.fixture(scope="module")
def source(model: Path) -> PromptSource:
    return PromptSource(Text.load(model), VOCAB)


@pytest.mark.parametrize("name", ["code", "prefill", "shuffled", "mixed", "random"])
def test_prompts_are_seeded(source: PromptSource, name: str):
    first = source.prompts(name, 40, seed=3)
    assert first == source.prompts(name, 40, seed=3)
    assert first != source.prompts(name, 40, seed=4)
    assert len(first) == 40
    assert {len(ids) for ids in source.prompts(name, 5, seed=3, input_tokens=17)} == {17}
    assert all(0 <= i < VOCAB for ids in first for i in ids)


def test_code_is_the_held_out_prompts(source: PromptSource):
    assert source.text is not None
    texts = [source.text.encode(excerpt.prompt) for excerpt in load_excerpts(HELD_OUT)]
    assert sorted(source.prompts("code", len(texts), seed=0)) == sorted(texts)


def test_long_prompts_end_as_short_ones_do(source: PromptSource):
    short, long = (source.prompts("code", 3, seed=1, input_tokens=n) for n in (20, 700))
    assert [ids[-20:] for ids in long] == short


def test_shuffled_has_the_tokens_of_code_and_not_their_order(source: PromptSource):
    code, shuffled = (source.prompts(name, 32, seed=0, input_tokens=200) for name in ("code", "shuffled"))
    pairs, mixed = (Counter(p for ids in some for p in pairwise(ids)) for some in (code, shuffled))
    assert {i for ids in shuffled for i in ids} <= {i for ids in source.prompts("code", 32, seed=0) for i in ids}
    assert mixed.most_common(1)[0][1] < pairs.most_common(1)[0][1], "no pair comes as often as in code"
    assert WORKLOADS["shuffled"].sampling


def test_mixed_has_greedy_code_and_sampled_shuffled_text_in_turns(source: PromptSource):
    """Of an odd number, too; and one temperature for all where 0 is asked for."""
    code, shuffled = (source.prompts(name, 3, seed=0) for name in ("code", "shuffled"))
    first, second = WORKLOADS["code"].sampling, WORKLOADS["shuffled"].sampling
    assert source.prompts("mixed", 5, seed=0) == [code[0], shuffled[0], code[1], shuffled[1], code[2]]
    assert [settings("mixed", place, 0.7) for place in (0, 3)] == [
        {"temperature": 0.0, **first},
        {"temperature": 0.7, **second},
    ]
    assert settings("mixed", 1, 0.0) == settings("shuffled", 5, 0.0) == {"temperature": 0.0, **second}


def test_file(source: PromptSource, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat"}\n\n{"prompt_token_ids": [1, 2, 3], "temperature": 0.5}\n')
    named = PromptSource(source.text, VOCAB, file)
    assert source.text is not None
    assert sorted(named.prompts("file", 2, seed=0)) == sorted([source.text.encode("the cat"), [1, 2, 3]])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"prompt_token_ids": [1, VOCAB]}, "line 1: needs token ids from 0 to 95"),
        ({"other": 1}, "line 1: exactly one of"),
        (None, "no prompts"),
    ],
    ids=str,
)
def test_bad_files_are_refused(source: PromptSource, tmp_path: Path, line: dict | None, why: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text("" if line is None else json.dumps(line))
    with pytest.raises(ConfigError, match=why):
        PromptSource(source.text, VOCAB, file).prompts("file", 2, seed=0)


def test_without_a_tokenizer():
    bare = PromptSource(None, 50)
    assert max(i for ids in bare.prompts("random", 50, seed=0) for i in ids) == 49
    with pytest.raises(ConfigError, match="use the workload random"):
        bare.prompts("code", 2, seed=0)
    with pytest.raises(ConfigError, match="is not known; known are"):
        bare.prompts("poems", 2, seed=0)
    with pytest.raises(ConfigError, match="needs --prompts"):
        bare.prompts("file", 2, seed=0)
