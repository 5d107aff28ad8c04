"""Tokenizers published as ranks: the same ids as merging by rank, special tokens, and files that are not usable."""

import base64
import itertools
import json
import random
import time
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import regex

from jaxspec.checkpoint.text import tiktoken
from jaxspec.checkpoint.text.codec import Text
from jaxspec.checkpoint.text.tokenizer import load_tokenizer
from jaxspec.errors import ConfigError

CORPUS = (
    "The cat sat on the mat; the cats' mats weren't 12345 or 2026 mats.\n\n\tdef f(x):\n        return x  # it's\r\n"
    "中文分词的测试、今天天气很好。今天天气不好。漢字かな交じり文のテスト。한국어 문장도 있다. "
    "Ünïcödé naïve Straße ДОМ дом 😀😀👩‍👩‍👧 e\u0301 ١٢٣ Ⅷ don't DON'T I'LL we'Ve  \u3000 x"
)
POOL = [*CORPUS, "  ", "\n\n", "<|im_end|>", "'s", "'LL", "今天", "123", "\u200d", "Dž"]


def trained_ranks(pattern: str, size: int) -> dict[bytes, int]:
    """Ranks of byte-pair training on the corpus: every byte, then the most frequent pair again and again."""
    ranks = {bytes([i]): i for i in range(256)}
    pieces = [[bytes([b]) for b in m.group().encode()] for m in regex.finditer(pattern, CORPUS, regex.V1)]
    while len(ranks) < size:
        pairs = Counter(pair for piece in pieces for pair in itertools.pairwise(piece))
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[left + right] = len(ranks)
        pieces = [merged_once(piece, left, right) for piece in pieces]
    return ranks


def merged_once(piece: list[bytes], left: bytes, right: bytes) -> list[bytes]:
    result: list[bytes] = []
    for token in piece:
        if result and (result[-1], token) == (left, right):
            result[-1] += token
        else:
            result.append(token)
    return result


def by_rank(ranks: dict[bytes, int], pattern: str, text: str) -> list[int]:
    """Ids of a text: in each piece the leftmost of the neighbors whose union has the lowest rank merges first."""
    ids = []
    for match in regex.finditer(pattern, text, regex.V1):
        parts = [bytes([b]) for b in match.group().encode()]
        while True:
            unions = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not unions:
                break
            _, place = min(unions)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def write(directory: Path, name: str, ranks: dict[bytes, int], **settings: Any) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (directory / name).write_bytes(b"\n".join(lines) + b"\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.Y"}}))
    return directory


def kimi(directory: Path, ranks: dict[bytes, int], **settings: Any) -> Path:
    first = len(ranks)
    named = {
        first: {"content": "[BOS]", "special": True},
        first + 1: {"content": "[EOS]", "special": True},
        first + 2: {"content": "<|im_end|>", "special": True},
        first + 13: {"content": "<|tool_call_begin|>", "special": False},
    }
    settings = {
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
        "added_tokens_decoder": {str(place): token for place, token in named.items()},
    } | settings  # fmt: skip
    return write(directory, "tiktoken.model", ranks, **settings)


LAYOUTS = [
    ("tiktoken.model", tiktoken.KIMI, "TikTokenTokenizer"),
    ("qwen.tiktoken", tiktoken.QWEN, "QWenTokenizer"),
    ("tokenizer.model", tiktoken.LLAMA_3, "PreTrainedTokenizerFast"),
]


@pytest.mark.parametrize(("name", "pattern", "kind"), LAYOUTS)
def test_ids_are_those_of_merging_by_rank(tmp_path: Path, name: str, pattern: str, kind: str):
    ranks = trained_ranks(pattern, 420)
    text = Text.load(write(tmp_path, name, ranks, tokenizer_class=kind))
    assert text is not None
    rng = random.Random(name)
    samples = [CORPUS, *("".join(rng.choices(POOL, k=rng.randint(1, 60))) for _ in range(300))]
    for sample in samples:
        sample = sample.replace("<|im_end|>", "<|im_e nd|>")
        sample = sample if name != "qwen.tiktoken" else unicodedata.normalize("NFC", sample)
        ids = text.encode(sample, add_special_tokens=False)
        assert ids == by_rank(ranks, pattern, sample), sample
        assert text.decode(ids) == sample
    assert max(map(len, ranks)) > 3


def test_han_runs_are_pieces_of_their_own(tmp_path: Path):
    ranks = trained_ranks(tiktoken.KIMI, 300)
    for token in ("中文", "文E"):
        parts = token.encode()
        for end in range(2, len(parts) + 1):
            ranks.setdefault(parts[:end], len(ranks))
    text = Text.load(kimi(tmp_path, ranks))
    assert text is not None
    ids = text.encode("中文English")
    assert ids == by_rank(ranks, tiktoken.KIMI, "中文English")
    assert ids[0] == ranks["中文".encode()]


def test_kimi_special_tokens(tmp_path: Path):
    ranks = trained_ranks(tiktoken.KIMI, 300)
    text = Text.load(kimi(tmp_path, ranks))
    assert text is not None
    tokenizer = text.tokenizer
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (556, 300, 301)
    assert text.encode("[BOS]a<|im_end|>") == [300, ord("a"), 302]
    assert text.encode("<|reserved_token_303|><|reserved_token_555|>") == [303, 555]
    assert text.decode([300, ord("a"), 313, 302]) == "a<|tool_call_begin|>"
    assert text.decode([302], skip_special_tokens=False) == "<|im_end|>"
    talk = [{"role": "user", "content": "ab"}]
    assert text.encode_chat(talk) == [*by_rank(ranks, tiktoken.KIMI, "ab"), 302]
    assert text.encode("a") == [ord("a")], "nothing is added at the start"


def test_a_template_of_its_own_file(tmp_path: Path):
    directory = kimi(tmp_path, trained_ranks(tiktoken.KIMI, 300), chat_template=None)
    (directory / "chat_template.jinja").write_text("[{{ messages[0].content }}]{{ eos_token }}")
    text = Text.load(directory)
    assert text is not None
    assert text.write_chat([{"role": "user", "content": "ab"}]) == "[ab][EOS]"


def test_llama_3_and_qwen_special_tokens(tmp_path: Path):
    ranks = trained_ranks(tiktoken.LLAMA_3, 300)
    llama = load_tokenizer(write(tmp_path, "tokenizer.model", ranks))
    assert llama("a<|eot_id|>")["input_ids"] == [300, ord("a"), 309]
    names = ["<|end_of_text|>", "<|start_header_id|>", "<|reserved_special_token_250|>"]
    assert llama.convert_tokens_to_ids(names) == [301, 306, 555]
    (tmp_path / "tokenizer.model").unlink()
    qwen = load_tokenizer(write(tmp_path, "qwen.tiktoken", ranks, tokenizer_class="QWenTokenizer"))
    assert qwen("<|im_start|>e\u0301<|endoftext|>")["input_ids"] == [301, *by_rank(ranks, tiktoken.QWEN, "é"), 300]
    assert qwen.convert_tokens_to_ids("<|extra_204|>") == 300 + 207


def test_as_many_ranks_as_kimi_has_take_seconds(tmp_path: Path):
    shorter = [bytes([i]) for i in range(256)]
    tokens = [*shorter, *(a + b for a in shorter for b in shorter)]
    tokens += [a + b for a in tokens[256:] for b in shorter[:2]][: 163_584 - len(tokens)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    directory = kimi(tmp_path, ranks)
    began = time.process_time()
    tokenizer = load_tokenizer(directory)
    assert time.process_time() - began < 20, "4 s here"
    assert len(tokenizer) == 163_840
    assert tokenizer("<|im_end|>")["input_ids"] == [163_586]


def test_python_of_another_pattern_is_not_guessed_at(tmp_path: Path):
    directory = kimi(tmp_path, trained_ranks(tiktoken.KIMI, 260))
    code = "class TikTokenTokenizer:\n    pat_str = '|'.join([{}])\n"
    parts = [repr(part) for part in tiktoken.KIMI.split("|") if part]
    (directory / "tokenization_kimi.py").write_text(code.format(repr(tiktoken.KIMI)))
    assert load_tokenizer(directory) is not None
    for pattern in (", ".join(parts[1:]), "x(1)"):
        (directory / "tokenization_kimi.py").write_text(code.format(pattern))
        with pytest.warns(RuntimeWarning, match="TikTokenTokenizer is code that comes with the model"):
            assert load_tokenizer(directory) is None


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda ranks: {k: v for k, v in ranks.items() if k != b"a"}, "1 of 256 bytes have no rank, the first 97"),
        (lambda ranks: ranks | {b"xy": 9}, "ranks are not 0 to"),
        (lambda ranks: ranks | {b"xy": 10_000}, "ranks are not 0 to"),
    ],
)
def test_unusable_ranks(tmp_path: Path, spoil: Any, says: str):
    directory = kimi(tmp_path, spoil(trained_ranks(tiktoken.KIMI, 260)))
    with pytest.raises(ConfigError, match=rf"tiktoken\.model: .*{says}"):
        Text.load(directory)


def test_broken_files_are_named(tmp_path: Path):
    ranks = trained_ranks(tiktoken.KIMI, 260)
    directory = kimi(tmp_path, ranks, added_tokens_decoder={"7": {"content": "<x>"}})
    with pytest.raises(ConfigError, match=r"added tokens \[7\] are ranks of tiktoken\.model"):
        Text.load(directory)
    for broken in ([1], {"a": {"content": "x"}}, {"300": {}}, {"300": {"content": 5}}, {"300": "x"}):
        kimi(tmp_path, ranks, added_tokens_decoder=broken)
        with pytest.raises(ConfigError, match="added_tokens_decoder is not usable"):
            Text.load(directory)
    kimi(tmp_path, ranks, added_tokens_decoder={str(10**12): {"content": "x"}})
    with pytest.raises(ConfigError, match=r"added tokens \[1000000000000\] are too far after the 260 ranks"):
        Text.load(directory)
    same = {"260": {"content": "x"}, "261": {"content": "x"}}
    kimi(tmp_path, ranks, added_tokens_decoder=same)
    with pytest.raises(ConfigError, match=r"added tokens \['x'\] have several ids"):
        Text.load(directory)
    kimi(tmp_path, ranks)
    (directory / "tiktoken.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(ConfigError, match="not lines of a base64 token and its rank"):
        Text.load(directory)
