"""Tokenizers published as ranks of byte strings, such as Kimi's ``tiktoken.model``, written as a tokenizer.json.

The published Python that goes with them is never run. It is parsed, and only to see that it still splits text as the
layout known here does. Encoding is by rank: in each piece of the text the pair of neighbors whose union has the lowest
rank merges first (github.com/openai/tiktoken), which is byte-pair encoding with every split of every token as a merge.
"""

from __future__ import annotations

import ast
import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.text.token_bytes import LETTER_OF
from jaxspec.errors import ConfigError

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
KIMI = "|".join((
    r"[\p{Han}]+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?", r"\p{N}{1,3}", *_SPACES,
))  # fmt: skip
LLAMA_3 = "|".join((_SHORT, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", *_SPACES))
QWEN = "|".join((_SHORT, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", *_SPACES))
PATTERN_NAMES = ("pat_str", "PAT_STR")
BYTES, MOST_ADDED = 256, 1 << 16


@dataclass(frozen=True)
class RankLayout:
    """One way of publishing ranks.

    Attributes:
      file: with the ranks.
      classes: names of the tokenizer classes that read it.
      pattern: splits a text before its pieces are merged.
      special: names of the ids after the ranks where ``added_tokens_decoder`` has none.
      start: special token that every prompt starts with.
      normalizer: of the text, None for none.
    """

    file: str
    classes: tuple[str | None, ...]
    pattern: str
    special: tuple[str, ...] = ()
    start: str | None = None
    normalizer: str | None = None


_RESERVED = tuple(f"<|reserved_special_token_{i}|>" for i in range(251))
LAYOUTS = (
    RankLayout("tiktoken.model", ("TikTokenTokenizer",), KIMI, ("",) * 256),
    RankLayout(
        "qwen.tiktoken", ("QWenTokenizer", "QWenTokenizerFast"), QWEN,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))), normalizer="NFC",
    ),
    RankLayout(
        "tokenizer.model",
        (None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast"), LLAMA_3,
        ("<|begin_of_text|>", "<|end_of_text|>", *_RESERVED[:4], "<|start_header_id|>", "<|end_header_id|>",
         _RESERVED[4], "<|eot_id|>", *_RESERVED[5:]),
        start="<|begin_of_text|>",
    ),
)  # fmt: skip


def layout_of(directory: Path, settings: Mapping[str, Any]) -> RankLayout | None:
    """Returns the layout of a directory's ranks, None if it has none that is known."""
    kind = settings.get("tokenizer_class") or own_class(settings).rpartition(".")[2] or None
    for layout in LAYOUTS:
        file = directory / layout.file
        if kind in layout.classes and file.exists() and _holds_ranks(file):
            return layout if _published_pattern(directory, settings) in (None, layout.pattern) else None
    return None


def tokenizer_json(directory: Path, layout: RankLayout, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Computes the tokenizer.json of a directory's ranks.

    Raises:
      ConfigError: the ranks or the added tokens are not usable.
    """
    ranks = read_ranks(directory / layout.file)
    added = _added_tokens(ranks, layout, settings)
    start = [{"SpecialToken": {"id": layout.start, "type_id": 0}}] if layout.start else []
    splits = [
        {"type": "Split", "pattern": {"Regex": layout.pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": layout.normalizer} if layout.normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": None if not layout.start else {
            "type": "TemplateProcessing",
            "single": [*start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [*start, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {layout.start: {"id": layout.start, "tokens": [layout.start], "ids": [
                next(entry["id"] for entry in added if entry["content"] == layout.start)]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {_letters(token): rank for token, rank in ranks.items()},
            "merges": [[_letters(left), _letters(right)] for left, right in merges(ranks)],
        },
    }  # fmt: skip


def read_ranks(file: Path) -> dict[bytes, int]:
    """Reads lines of a base64 byte string and its rank; every byte must have one, and ranks count from 0.

    Raises:
      ConfigError: the file says something else.
    """
    try:
        ranks = dict(_rank(line) for line in file.read_bytes().splitlines() if line.strip())
    except ValueError as error:
        raise ConfigError(f"{file}: not lines of a base64 token and its rank ({error}); get it anew") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    if missing := [byte for byte in range(BYTES) if bytes([byte]) not in ranks]:
        raise ConfigError(f"{file}: {len(missing)} of {BYTES} bytes have no rank, the first {missing[0]}; get it anew")
    if set(ranks.values()) != set(range(len(ranks))):
        raise ConfigError(f"{file}: ranks are not 0 to {len(ranks) - 1}, each once; get it anew")
    return ranks


def _rank(line: bytes) -> tuple[bytes, int]:
    token, rank = line.split()
    return base64.b64decode(token, validate=True), int(rank)


def merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the pairs of tokens that make a token, the lowest rank of the union first."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        yield from sorted(
            (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks), key=lambda p: (ranks[p[0]], ranks[p[1]])
        )


def _added_tokens(ranks: Mapping[bytes, int], layout: RankLayout, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = settings.get("added_tokens_decoder") or {}
    try:
        named = {int(key): dict(value) for key, value in given.items()}
        for value in named.values():
            value["content"].encode()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"tokenizer_config.json: added_tokens_decoder is not usable ({error!r})") from error
    first = len(ranks)
    for token_id, name in enumerate(() if named and layout.start else layout.special, first):
        content = name or f"<|reserved_token_{token_id}|>"
        named.setdefault(token_id, {"content": content, "special": bool(name)})
    if wrong := [i for i, value in named.items() if i < first and ranks.get(value["content"].encode()) != i]:
        raise ConfigError(f"tokenizer_config.json: added tokens {wrong[:5]} are ranks of {layout.file} by other names")
    if beyond := [i for i in named if i >= first + MOST_ADDED]:
        raise ConfigError(f"tokenizer_config.json: added tokens {beyond[:5]} are too far after the {first} ranks")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokens = []
    for i in (*sorted(i for i in named if i < first), *range(first, max(named, default=0) + 1)):
        value = named.get(i, {"content": f"<|reserved_token_{i}|>"})
        tokens.append({"id": i, "content": value["content"]} | {k: bool(value.get(k, v)) for k, v in flags.items()})
    names = Counter(token["content"] for token in tokens)
    if repeated := sorted(name for name, count in names.items() if count > 1):
        raise ConfigError(f"tokenizer_config.json: added tokens {repeated[:5]} have several ids")
    return tokens


def _holds_ranks(file: Path) -> bool:
    """Whether a file called tokenizer.model holds ranks, not a SentencePiece model, which starts with a field tag."""
    if file.name != "tokenizer.model":
        return True
    with file.open("rb") as opened:
        return opened.read(1) not in (b"\n", b"")


def _published_pattern(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Returns the pattern in the Python file that tokenizer_config.json names, by parsing it; None if there is none."""
    name = own_class(settings).rpartition("--")[2].partition(".")[0]
    try:
        tree = ast.parse((directory / f"{name}.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(_name(target) in PATTERN_NAMES for target in node.targets):
            return _joined(node.value)
    return None


def own_class(settings: Mapping[str, Any]) -> str:
    """Returns the module and class of its own that tokenizer_config.json names, '' where it names none."""
    places = settings.get("auto_map")
    names = places.get("AutoTokenizer") if isinstance(places, Mapping) else places
    names = names if isinstance(names, list | tuple) else [names]
    return next((name for name in names if isinstance(name, str)), "")


def _name(node: ast.expr) -> str | None:
    return getattr(node, "id", getattr(node, "attr", None))


def _joined(node: ast.expr) -> str | None:
    """Returns a string, or a list of strings joined by one; '' if it is anything else."""
    try:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            return ast.literal_eval(node.func.value).join(ast.literal_eval(node.args[0]))
        return str(ast.literal_eval(node))
    except (AttributeError, IndexError, TypeError, ValueError):
        return ""


def _letters(token: bytes) -> str:
    return token.decode("latin-1").translate(LETTER_OF)
