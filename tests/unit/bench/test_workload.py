"""Workloads: seeded, of the length that is asked for, and refused with a reason."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from jaxspec.bench.excerpts import HELD_OUT, load_excerpts
from jaxspec.bench.prompt_source import PromptSource, read_prompts
from jaxspec.bench.published import UNRESOLVED, human_eval, speed_bench
from jaxspec.bench.workload import OWN, WORKLOADS, parse_workload, settings
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError

VOCAB = 96


@pytest.fixture(scope="module")
def source(model: Path) -> PromptSource:
    return PromptSource(Text.load(model), VOCAB)


@pytest.mark.parametrize("name", ["held-out", "prefill", "shuffled", "mixed", "random"])
def test_prompts_are_seeded(source: PromptSource, name: str):
    first = source.prompts(name, 40, seed=3)
    assert first == source.prompts(name, 40, seed=3)
    assert first != source.prompts(name, 40, seed=4)
    assert len(first) == 40
    assert {len(ids) for ids in source.prompts(name, 5, seed=3, input_tokens=17)} == {17}
    assert all(0 <= i < VOCAB for ids in first for i in ids)


def test_held_out_is_the_held_out_prompts(source: PromptSource):
    assert source.text is not None
    texts = [source.text.encode(excerpt.prompt) for excerpt in load_excerpts(HELD_OUT)]
    assert sorted(source.prompts("held-out", len(texts), seed=0)) == sorted(texts)


def test_long_prompts_end_as_short_ones_do(source: PromptSource):
    short, long = (source.prompts("held-out", 3, seed=1, input_tokens=n) for n in (20, 700))
    assert [ids[-20:] for ids in long] == short


def test_shuffled_has_the_tokens_of_code_and_not_their_order(source: PromptSource):
    code, shuffled = (source.prompts(name, 32, seed=0, input_tokens=200) for name in ("held-out", "shuffled"))
    pairs, mixed = (Counter(p for ids in some for p in pairwise(ids)) for some in (code, shuffled))
    assert {i for ids in shuffled for i in ids} <= {i for ids in source.prompts("held-out", 32, seed=0) for i in ids}
    assert mixed.most_common(1)[0][1] < pairs.most_common(1)[0][1], "no pair comes as often as in code"
    assert WORKLOADS["shuffled"].sampling


def test_mixed_has_greedy_code_and_sampled_shuffled_text_in_turns(source: PromptSource):
    """Of an odd number, too; and one temperature for all where 0 is asked for."""
    code, shuffled = (source.prompts(name, 3, seed=0) for name in ("held-out", "shuffled"))
    first, second = WORKLOADS["held-out"].sampling, WORKLOADS["shuffled"].sampling
    assert source.prompts("mixed", 5, seed=0) == [code[0], shuffled[0], code[1], shuffled[1], code[2]]
    assert [settings("mixed", place, 0.7) for place in (0, 3)] == [
        {"temperature": 0.0, **first},
        {"temperature": 0.7, **second},
    ]
    assert settings("mixed", 1, 0.0) == settings("shuffled", 5, 0.0) == {"temperature": 0.0, **second}


def test_file(source: PromptSource, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat"}\n\n{"prompt_token_ids": [1, 2, 3], "temperature": 0.5}\n')
    named = PromptSource(source.text, VOCAB, {"file": file})
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
        PromptSource(source.text, VOCAB, {"file": file}).prompts("file", 2, seed=0)


def test_without_a_tokenizer():
    bare = PromptSource(None, 50)
    assert max(i for ids in bare.prompts("random", 50, seed=0) for i in ids) == 49
    with pytest.raises(ConfigError, match="use the workload random"):
        bare.prompts("held-out", 2, seed=0)
    with pytest.raises(ConfigError, match="is not known; known are"):
        bare.prompts("poems", 2, seed=0)
    with pytest.raises(ConfigError, match="needs --prompts"):
        bare.prompts("file", 2, seed=0)


def test_own_workloads_are_whole():
    """Enough prompts, no two alike, none that ends where a tokenizer would have gone on."""
    own = {file.stem: [prompt for _, prompt in read_prompts(file)] for file in OWN.glob("*.jsonl")}
    assert set(own) == {"chat", "code", "math", "summarization", "rewriting", "multi-turn"}
    every = [json.dumps(prompt) for prompts in own.values() for prompt in prompts]
    assert len(set(every)) == len(every)
    for name, prompts in own.items():
        assert len(prompts) >= 20
        assert WORKLOADS[name].ends
        for prompt in prompts:
            talk = prompt.get("messages", [])
            assert [m["role"] for m in talk] == ["user", "assistant"] * (len(talk) // 2) + ["user"] * bool(talk)
            assert (len(talk) > 1) == (name == "multi-turn")
            assert prompt.get("prompt", "x") == prompt.get("prompt", "x").rstrip()


def test_a_model_that_cannot_chat_is_refused(source: PromptSource, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source.text, "model_type", "opt")
    monkeypatch.setattr(source.text.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match=r"chat.jsonl: line 1: a conversation that this model cannot have"):
        source.prompts("chat", 2, seed=0)


def test_speed_bench(tmp_path: Path):
    rows = [
        {"category": "math", "turns": ["2 + 2?", "And 3?"]},
        {"category": "coding", "messages": [{"role": "user", "content": "Sort."}]},
    ]
    (tmp_path / "qualitative.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = ({"messages": [{"role": "user", "content": text}]} for text in ("2 + 2?", "Sort."))
    assert speed_bench(tmp_path) == [first, second]
    assert speed_bench(tmp_path / "qualitative.jsonl", "coding") == [second]
    with pytest.raises(ConfigError, match=r"no category 'qa'; there are \['coding', 'math'\]"):
        speed_bench(tmp_path, "qa")
    with pytest.raises(ConfigError, match=r"neither qualitative\.jsonl nor"):
        speed_bench(tmp_path / "nowhere")
    (tmp_path / "qualitative.jsonl").write_text(json.dumps({"category": "math", "turns": [f"{UNRESOLVED} FROM"]}))
    with pytest.raises(ConfigError, match="not in it yet; run"):
        speed_bench(tmp_path)
    (tmp_path / "qualitative.jsonl").write_text('{"other": 1}')
    with pytest.raises(ConfigError, match="no prompts of SPEED-Bench"):
        speed_bench(tmp_path)


def test_human_eval(source: PromptSource, tmp_path: Path):
    file = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(file, "wt") as lines:
        lines.write('{"task_id": "HumanEval/0", "prompt": "the cat", "entry_point": "f"}\n')
    name, path = parse_workload(f"human-eval={file}")
    assert path is not None
    assert source.text is not None
    assert PromptSource(source.text, VOCAB, {name: path}).pool(name) == [source.text.encode("the cat")]
    file.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="cannot be read as lines of JSON"):
        human_eval(file)
