"""Tokenizers in GGUF files, written as the files that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.gguf.gguf_header import GgufHeader
from jaxspec.errors import ConfigError

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4  # llama.cpp's types of tokens
SPACE = "▁"
SENTENCEPIECE = "llama"  # llama.cpp's name of the kind
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = "|".join((_SHORT, _WORD, r"\p{N}{1,3}", _MARKS, *_SPACES))
QWEN_2 = "|".join((_SHORT, _WORD, r"\p{N}", _MARKS, *_SPACES))
GPT_4O = "|".join((
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", *_SPACES,
))  # fmt: skip
DEEPSEEK_3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "|".join((
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*", *_SPACES,
    )),
)  # fmt: skip
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DIGITS, GPT_2 = "digits", "gpt-2"  # GPT-2's own splits, with each digit alone or not
# Where the file does not say otherwise a prompt starts with a token, and a piece in the vocabulary is not merged.
LLAMA_3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3")
SPLITS: Mapping[str, tuple[str, ...] | str] = {
    **dict.fromkeys((*LLAMA_3_NAMES, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (LLAMA_3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), (QWEN_2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (GPT_4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK_3),
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "trillion"), GPT_2),
}  # fmt: skip
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # NFC
Settings = dict[str, Any]


def write_tokenizer(header: GgufHeader, directory: Path) -> bool:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``; returns whether the file has a tokenizer.

    Raises:
      ConfigError: it is of a kind that is not known, or not complete.
    """
    if header.metadata.get(f"{KEY}model") in (None, "none", "no_vocab"):
        return False
    for name, content in (("tokenizer.json", tokenizer_of(header)), ("tokenizer_config.json", settings_of(header))):
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return True


def tokenizer_of(header: GgufHeader) -> Settings:
    """Returns the ``tokenizer.json``.

    Raises:
      ConfigError: it is of a kind that is not known, or not complete.
    """
    kind, metadata = header.metadata.get(f"{KEY}model"), header.metadata
    tokens = _texts(header, "tokens")
    types = metadata.get(f"{KEY}token_type") or [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ConfigError(f"{header.file}: {KEY}token_type is not one number per token")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConfigError(f"{header.file}: tokens of its vocabulary are there twice")
    if kind == "gpt2":
        body = _byte_level(header, vocab)
    elif kind == SENTENCEPIECE:
        body = _sentencepiece(header, vocab, types)
    else:
        raise ConfigError(f"{header.file}: its tokenizer is of kind {kind!r}; read are gpt2 and llama")
    added = [_added(i, tokens[i], special=kind != USER) for i, kind in enumerate(types) if kind in (CONTROL, USER)]
    return {"version": "1.0", "added_tokens": added, "post_processor": _started(header, tokens), **body}


def settings_of(header: GgufHeader) -> Settings:
    """Returns the ``tokenizer_config.json``.

    Raises:
      ConfigError: ids of special tokens are beyond the vocabulary.
    """
    tokens, metadata = _texts(header, "tokens"), header.metadata
    settings: Settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in ROLES.items():
        if (token := _token(header, tokens, key)) is not None:
            settings[f"{name}_token"] = token
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings


def _texts(header: GgufHeader, name: str) -> list[str]:
    texts = header.metadata.get(KEY + name)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{header.file}: no list of texts {KEY}{name}, so its tokenizer cannot be read")
    return texts


def _token(header: GgufHeader, tokens: Sequence[str], role: str) -> str | None:
    number = header.metadata.get(f"{KEY}{role}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ConfigError(f"{header.file}: {KEY}{role}_token_id is {number!r}, of {len(tokens)} tokens")
    return tokens[number]


def _added(number: int, content: str, *, special: bool) -> Settings:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


def _started(header: GgufHeader, tokens: Sequence[str]) -> Settings | None:
    """Returns the stage that puts a token before every prompt, None where there is none."""
    metadata = header.metadata
    pre = metadata.get(f"{KEY}pre") if metadata.get(f"{KEY}model") == "gpt2" else SENTENCEPIECE
    start = _token(header, tokens, "bos")
    if start is None or not metadata.get(f"{KEY}add_bos_token", pre in (*LLAMA_3_NAMES, SENTENCEPIECE)):
        return None
    first, text = {"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    ids = [tokens.index(start)]
    return {
        "type": "TemplateProcessing", "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {start: {"id": start, "ids": ids, "tokens": [start]}},
    }  # fmt: skip


def _byte_level(header: GgufHeader, vocab: Mapping[str, int]) -> Settings:
    """Returns the stages of byte-level byte-pair encoding."""
    pre: Any = header.metadata.get(f"{KEY}pre")
    if not isinstance(pre, str) or pre not in SPLITS:
        raise ConfigError(
            f"{header.file}: its tokenizer splits texts in the way {pre!r}, which is not known; known are "
            f"{', '.join(sorted(SPLITS))}"
        )
    merges = [merge.split(" ", 1) for merge in _texts(header, "merges")]
    if wrong := [m for m in merges if len(m) != 2 or m[0] not in vocab or m[1] not in vocab or "".join(m) not in vocab]:
        raise ConfigError(f"{header.file}: {len(wrong)} merges of its tokenizer name no tokens, the first {wrong[0]}")
    splits, letters = SPLITS[pre], {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    stages: list[Settings] = [{"type": "Digits", "individual_digits": True}] if splits == DIGITS else []
    if not isinstance(splits, str):
        stages = [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
        ]
    stages.append({**letters, "use_regex": isinstance(splits, str)})
    return {
        "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": stages},
        "decoder": {**letters, "use_regex": True},
        "model": {"type": "BPE", "vocab": dict(vocab), "merges": merges, "ignore_merges": pre in LLAMA_3_NAMES},
    }


def _sentencepiece(header: GgufHeader, vocab: Mapping[str, int], types: Sequence[int]) -> Settings:
    """Returns the stages of SentencePiece's byte-pair encoding with byte tokens."""
    scores = header.metadata.get(f"{KEY}scores")
    if not isinstance(scores, list) or len(scores) != len(vocab):
        raise ConfigError(f"{header.file}: {KEY}scores is not one number per token")
    unknown = next((token for token, kind in zip(vocab, types, strict=True) if kind == UNKNOWN), None)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefixed = header.metadata.get(f"{KEY}add_space_prefix", True)
    normalizers = [{"type": "Prepend", "prepend": SPACE}, spaces] if prefixed else [spaces]
    decoders: list[Settings] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "vocab": dict(vocab), "merges": list(_merges(vocab, scores)), "unk_token": unknown,
            "fuse_unk": True, "byte_fallback": True,
        },
    }  # fmt: skip


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> Iterator[list[str]]:
    """Yields the pairs of tokens that make a token, the highest score of the union first."""
    for token in sorted(vocab, key=lambda t: (-scores[vocab[t]], vocab[t])):
        pairs = ([token[:i], token[i:]] for i in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        yield from sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
