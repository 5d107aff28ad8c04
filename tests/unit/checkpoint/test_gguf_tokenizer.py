import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from jaxspec.checkpoint.gguf.convert import convert_gguf
from jaxspec.checkpoint.gguf.gguf_tokenizer import SPLITS
from jaxspec.checkpoint.load.model import read_config
from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError
from tests.unit.checkpoint.gguf_files import write_gguf

GOLDEN = Path(__file__).parents[2] / "golden"
SAMPLE = (
    "The river froze early that year; it's 1234 days' walk, HelloWorld don't  stop.\n\n\tdef f(x_1): return x**2 # ok\n"
    "Café déjà-vu e\u0301 Ünïcödé 你好世界 こんにちは 🙂 100,000.50 foo/\n/bar WE'LL \r\n   end   "
)
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
# What each way of splitting makes of a text, from llama.cpp's sources: only the boundaries, no vocabulary.
PIECES = {
    "smollm": ["a", "1", "2", "3", "4", " HelloWorld", "'", "LL"],
    "gpt-2": ["a", "1234", " HelloWorld", "'", "LL"],
    "llama-bpe": ["a", "123", "4", " HelloWorld", "'LL"],
    "qwen2": ["a", "1", "2", "3", "4", " HelloWorld", "'LL"],
    "gpt-4o": ["a", "123", "4", " Hello", "World'LL"],
    "deepseek-v3": ["a", "123", "4", " HelloWorld", "'LL"],
}


@cache
def trained() -> tuple[dict[str, int], list[str]]:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([SAMPLE * 3], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    return state["vocab"], [" ".join(pair) for pair in state["merges"]]


def metadata(pre: str, **more: Any) -> dict[str, Any]:
    vocab, merges = trained()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|end|>", "<think>"]
    types = [1] * len(vocab) + [3, 4]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(vocab), "tokenizer.ggml.bos_token_id": len(vocab),
        "tokenizer.chat_template": TEMPLATE, **more,
    }  # fmt: skip


def text_of(tmp_path: Path, said: dict[str, Any]) -> Text:
    text = Text.load(write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf", text=said))
    assert text is not None
    return text


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_way_of_splitting_keeps_the_text(pre: str, tmp_path: Path):
    text = text_of(tmp_path, metadata(pre, **{"tokenizer.ggml.add_bos_token": False}))
    sample = SAMPLE.replace("e\u0301", "")
    ids = text.encode(sample + "<|end|><think>")
    assert text.decode(ids, skip_special_tokens=False) == sample + "<|end|><think>"
    vocab, _ = trained()
    assert ids[-2:] == [len(vocab), len(vocab) + 1]
    assert text.decode(ids[-2:]) == "<think>"  # which is no special token
    assert text.token_bytes.layout == "bytes"


@pytest.mark.parametrize("pre", sorted(PIECES))
def test_where_texts_are_split(pre: str, tmp_path: Path):
    text = text_of(tmp_path, metadata(pre))
    pieces = text.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a1234 HelloWorld'LL")
    assert [piece.replace("Ġ", " ") for piece, _ in pieces] == PIECES[pre]


def test_the_splits_are_those_of_transformers():
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    both = {name for name in theirs if isinstance(SPLITS.get(name), tuple)}
    assert {"llama-bpe", "qwen2", "gpt-4o"} <= both
    for name in both:
        (ours,) = SPLITS[name]
        one, other = (pre_tokenizers.Split(Regex(p), "isolated").pre_tokenize_str(SAMPLE) for p in (ours, theirs[name]))
        assert one == other


@pytest.mark.parametrize(("pre", "name"), [("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer")])
def test_ids_are_those_of_the_published_classes(pre: str, name: str, tmp_path: Path):
    import transformers

    vocab, merges = trained()
    theirs = getattr(transformers, name)(vocab=dict(vocab), merges=[tuple(m.split(" ")) for m in merges])
    text = text_of(tmp_path, metadata(pre, **{"tokenizer.ggml.add_bos_token": False}))
    assert text.encode(SAMPLE) == theirs(SAMPLE, add_special_tokens=False)["input_ids"]


def test_special_tokens_and_template(tmp_path: Path):
    vocab, _ = trained()
    text = text_of(tmp_path, metadata("qwen2"))
    assert text.tokenizer.eos_token == "<|end|>"
    assert text.write_chat([{"role": "user", "content": "hi"}]) == "<|user|>hi"
    assert text.encode("a")[0] != len(vocab)
    started = text_of(tmp_path, metadata("llama-bpe"))  # which starts prompts where the file does not say
    assert started.encode("a")[0] == len(vocab)
    assert started.encode("a", add_special_tokens=False)[0] != len(vocab)


SPM = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
SPM += ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "▁he", "lo"]


def test_sentencepiece(tmp_path: Path):
    from transformers import LlamaTokenizer

    scores = [0.0] * 259 + [float(-n) for n in range(len(SPM) - 259)]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(SPM) - 259)
    said = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": SPM, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    text = text_of(tmp_path, said)
    vocab = {token: i for i, token in enumerate(SPM)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "he"), ("l", "o")]
    theirs = LlamaTokenizer(vocab=vocab, merges=merges)
    for sample in ("hello hello", "hell o é lo", "hello  he\nll"):
        ids = text.encode(sample)
        assert ids[0] == 1
        assert ids[1:] == theirs(sample, add_special_tokens=False)["input_ids"]
        assert text.decode(ids) == sample
    assert text.encode("hello") == [1, vocab["▁hello"]]
    assert text.encode(" hello") == [1, vocab["▁"], vocab["▁hello"]]  # as SentencePiece; that class drops a space
    assert text.token_bytes.layout == "pieces"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "splits texts in the way 'martian', which is not known; known are"),
        ({"tokenizer.ggml.model": "bert"}, "its tokenizer is of kind 'bert'; read are gpt2 and llama"),
        ({"tokenizer.ggml.merges": ["a zzzz"]}, "merges of its tokenizer name no tokens"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999, of"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type is not one number per token"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "are there twice"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=words):
        text_of(tmp_path, metadata("qwen2", **changes))


def test_a_file_without_a_tokenizer(tmp_path: Path):
    assert Text.load(write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf")) is None


def test_conversion(tmp_path: Path):
    from transformers import AutoTokenizer

    file = write_gguf(GOLDEN / "qwen3", tmp_path / "m.gguf", text=metadata("qwen2"))
    out = tmp_path / "out"
    convert_gguf(file, out, "float32")
    assert sorted(f.name for f in out.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    text = Text.load(file)
    assert text is not None
    assert AutoTokenizer.from_pretrained(out)(SAMPLE)["input_ids"] == text.encode(SAMPLE)
    assert read_config(out)["architectures"] == ["Qwen3ForCausalLM"]
    with pytest.raises(ConfigError, match="is there already"):
        convert_gguf(file, out)
    shutil.rmtree(out)
    with pytest.raises(ConfigError, match="martian"):
        convert_gguf(write_gguf(GOLDEN / "qwen3", tmp_path / "w.gguf", text=metadata("martian")), out)
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
