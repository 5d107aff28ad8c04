"""Ways to break a sound model directory, each with the error that it must lead to.

Each changes a directory as ``write_tiny_model`` makes it in place. They are rows of tests, and what a fuzz draws from.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.model_edits import (
    EMBEDDING,
    EXPERT,
    HEAD,
    INDEX,
    NORM,
    WEIGHTS,
    Change,
    header,
    index,
    put,
    raw_header,
    replaced,
    shard,
    tensors,
    text,
    write_index,
)  # fmt: skip

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
DEEP = 100_000


@dataclass(frozen=True)
class Mutation:
    """One way to break a directory.

    Attributes:
      name: of the case.
      change: makes it.
      error: kind of the error on loading.
      words: regular expression that its message contains.
      in_numbers: whether only reading the weights shows it, so that ``inspect`` cannot.
    """

    name: str
    change: Change
    error: type[Exception]
    words: str
    in_numbers: bool = False


def _socket(file: Path) -> None:
    here = Path.cwd()
    os.chdir(file.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(file.name)
    finally:
        os.chdir(here)


def _outside(file: Path) -> None:
    """A link to a sound file in another directory."""
    other = file.parent.with_name("other")
    other.mkdir()
    source = file.parent / "tokenizer.json"
    (other / file.name).write_bytes(source.read_bytes() if source.exists() else b"{}")
    file.symlink_to(other / file.name)


SPECIAL: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a directory": (Path.mkdir, "a directory, not a file"),
    "a named pipe": (os.mkfifo, "a named pipe, not a file"),
    "a socket": (_socket, "a socket, not a file"),
    "a device": (lambda file: file.symlink_to("/dev/zero"), "a device, not a file"),
    "a loop": (lambda file: file.symlink_to(file.name), "a link that leads back to itself"),
    "a link to nothing": (lambda file: file.symlink_to("gone"), "a link to a file that is not there"),
    "a link outside": (_outside, "a link out of the model directory"),
    "git-lfs": (lambda file: file.write_text(POINTER), "a git-lfs pointer.*git lfs pull"),
}
JSON = {
    "nested": ('{"a":' * DEEP + "1" + "}" * DEEP, "nested too deeply"),
    "nested lists": ("[" * DEEP + "]" * DEEP, "nested too deeply"),
    "Latin-1": ('{"a": "\u00e9"}'.encode("latin-1"), "not UTF-8 at byte 7"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "BOM": (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    "a list": ("[1]", "a JSON object is needed, got list"),
    "two values": ('{"a": 1, "a": 2}', "the key 'a' has two values"),
    "empty": ("", "not readable as JSON"),
    "a long number": ('{"a": ' + "9" * 5000 + "}", "not readable as JSON"),
}


def _template(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    os.mkfifo(directory / "additional_chat_templates" / "tool_use.jinja")


def _special() -> list[Mutation]:
    kinds: dict[str, type[Exception]] = {
        "config.json": ConfigError, "generation_config.json": ConfigError, "tokenizer.json": ConfigError,
        "tokenizer_config.json": ConfigError, "chat_template.jinja": ConfigError, WEIGHTS: CheckpointError,
    }  # fmt: skip
    return [
        Mutation(f"{name} is {what}", replaced(name, make), error, f"{name}: {words}")
        for name, error in kinds.items()
        for what, (make, words) in SPECIAL.items()
    ]


def _json() -> list[Mutation]:
    files: dict[str, type[Exception]] = {
        "config.json": ConfigError,
        "generation_config.json": ConfigError,
        INDEX: CheckpointError,
    }
    whole = [
        Mutation(f"{name}: {what}", text(name, content), error, f"{name}: .*{words}")
        for name, error in files.items()
        for what, (content, words) in JSON.items()
    ]
    headers = [
        Mutation(
            f"header: {what}",
            lambda d, c=content: raw_header(d, c if isinstance(c, bytes) else c.encode()),
            CheckpointError,
            f"{WEIGHTS}: the header: .*{words}",
        )
        for what, (content, words) in JSON.items()
    ]
    return whole + headers


def _first(places: dict[str, Any]) -> str:
    return next(iter(places))


def _wrong(name: str, change: Change, words: str, *, in_numbers: bool = False) -> Mutation:
    """Weights that are refused."""
    return Mutation(name, change, CheckpointError, words, in_numbers)


def _shard_name(name: Any, words: str) -> Mutation:
    change = index(lambda _, places: places.update({_first(places): name}))
    return _wrong(f"index names {str(name)[:30]!r}", change, f"{INDEX}: .*{words}")


def _special_shard(what: str) -> Mutation:
    make, words = SPECIAL[what]

    def change(directory: Path, places: dict[str, Any]) -> None:
        replaced("extra.safetensors", make)(directory)
        places[_first(places)] = "extra.safetensors"

    return _wrong(f"a shard is {what}", index(change), f"extra.safetensors: {words}")


def _offsets(*offsets: Any) -> Change:
    return header(lambda held: held[NORM].update(data_offsets=list(offsets)))


def _entry(**values: Any) -> Change:
    return header(lambda held: held[NORM].update(values))


def _float_offsets(held: dict[str, Any]) -> None:
    held[NORM]["data_offsets"] = [float(n) for n in held[NORM]["data_offsets"]]


def _overlap(held: dict[str, Any]) -> None:
    """Two tensors of one size in one place, and nothing in the other's."""
    held[EXPERT]["data_offsets"] = held[EXPERT.replace(".1.", ".2.")]["data_offsets"]


def _trailing(directory: Path) -> None:
    with (directory / WEIGHTS).open("ab") as file:
        file.write(b"more")


def _long_header(directory: Path) -> None:
    raw_header(directory, b"{}", length=150_000_000)
    os.truncate(directory / WEIGHTS, 200_000_000)


def _halved(directory: Path) -> None:
    os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size // 2)


def _without_index(directory: Path) -> None:
    places = shard(directory)
    (directory / INDEX).unlink()
    name = _first(places)
    save_file({name: load_file(directory / places[name])[name]}, directory / "overlay.safetensors")


def _index_of_a_list(directory: Path) -> None:
    shard(directory)
    write_index(directory, [1])


def _renamed(name: str) -> Change:
    def change(directory: Path) -> None:
        (directory / WEIGHTS).rename(directory / name)

    return change


def _as(name: str, dtype: Any) -> Change:
    return tensors(lambda held: held.update({name: held[name].astype(dtype)}))


INDEXES = (
    _shard_name("../other.safetensors", "not the name of a file in it"),
    _shard_name("a/../../other.safetensors", "not the name of a file in it"),
    _shard_name("/etc/passwd", "not the name of a file in it"),
    _shard_name(".", "not the name of a file in it"),
    _shard_name("", "not the name of a file in it"),
    _shard_name("x" * 5000, "File name too long"),
    _shard_name("nul\0.safetensors", "cannot be read"),
    _shard_name(7, "not a weight index"),
    _shard_name(None, "not a weight index"),
    _wrong("index of a list", _index_of_a_list, "not a weight index"),
    _wrong(
        "a shard is gone",
        index(lambda _, places: places.update({_first(places): "model-9.safetensors"})),
        r"shards that are not there: \['model-9.safetensors'\]",
    ),
    _wrong(
        "a tensor is in another shard",
        index(lambda _, places: places.update({_first(places): list(places.values())[1]})),
        "the index names 1 tensors that their files lack",
    ),
    _wrong(
        "a tensor is in no shard",
        index(lambda _, places: places.update({"model.mystery.weight": places[_first(places)]})),
        "the index names 1 tensors that their files lack: model.mystery.weight in model-0000",
    ),
    *map(_special_shard, SPECIAL),
)
HEADERS = (
    _wrong("offsets are floats", header(_float_offsets), "unreadable entry"),
    _wrong("offsets are flags", _offsets(False, True), "unreadable entry"),
    _wrong("offsets are negative", _offsets(-64, 0), "unreadable entry"),
    _wrong("three offsets", _offsets(0, 1, 2), "unreadable entry"),
    _wrong("offsets are swapped", header(lambda held: held[NORM]["data_offsets"].reverse()), "does not fill"),
    _wrong("offsets are huge", _offsets(2**62, 2**63), "truncated"),
    _wrong("a negative axis", _entry(shape=[-1]), "unreadable entry"),
    _wrong("a huge axis", _entry(shape=[2**63, 2**63]), "does not fill"),
    _wrong("axes are text", _entry(shape=["4"]), "unreadable entry"),
    _wrong("an unknown dtype", _entry(dtype="F3"), "unreadable entry"),
    _wrong("a dtype is a list", _entry(dtype=["F32"]), "unreadable entry"),
    _wrong(
        "a name of two lines", header(lambda held: held.update({"a\nb": held.pop(NORM)})), r"'a\\nb' has an unreadable"
    ),
    _wrong("an entry is a number", header(lambda held: held.update({NORM: 3})), "unreadable entry"),
    _wrong("tensors overlap", header(_overlap), "overlaps|does not follow"),
    _wrong("a tensor is cut out", header(lambda held: held.pop(EXPERT)), "does not follow|after the last"),
    _wrong("bytes after the last tensor", _trailing, "4 bytes after the last tensor"),
    _wrong("a huge header", lambda directory: raw_header(directory, b"{}", length=2**62), "truncated"),
    _wrong("a header over the limit", _long_header, "a header of 150000000 bytes, at most 100000000"),
    _wrong("no header", text(WEIGHTS, b"abc"), "truncated: 3 bytes"),
    _wrong("cut in half", _halved, "truncated"),
    _wrong("duplicates without an index", _without_index, "overlay.safetensors both hold .*no index says"),
    _wrong("no weights", lambda directory: (directory / WEIGHTS).unlink(), "no .safetensors file"),
    _wrong("a pickle alone", _renamed("pytorch_model.bin"), "it holds pytorch_model.bin: .*safe_serialization"),
    _wrong("GGUF alone", _renamed("tiny.gguf"), "it holds tiny.gguf"),
)
NUMBERS = (
    _wrong(
        "NaN in an expert",
        tensors(put(EXPERT, (3, 5), np.nan)),
        rf"{EXPERT}: 1 of \d+ numbers are not finite .* at \[3, 5\]",
        in_numbers=True,
    ),
    _wrong(
        "infinity in the embedding",
        tensors(put(EMBEDDING, (7, 0), np.inf)),
        rf"{EMBEDDING}: 1 of .* at \[7, 0\]",
        in_numbers=True,
    ),
    _wrong(
        "-infinity in a norm",
        tensors(put(NORM, slice(2, 5), -np.inf)),
        rf"{NORM}: 3 of .* at \[2\]",
        in_numbers=True,
    ),
    _wrong("NaN in the head", tensors(put(HEAD, (1, 2), np.nan)), rf"{HEAD}: 1 of .* at \[1, 2\]", in_numbers=True),
    _wrong(
        "float32 beyond bfloat16",
        tensors(lambda held: held.update({NORM: np.full(held[NORM].shape, 3.4e38, np.float32)})),
        f"{NORM}: holds numbers that are too large for bfloat16",
        in_numbers=True,
    ),
    _wrong("an embedding of I16", _as(EMBEDDING, np.int16), f"{EMBEDDING}: int16 in the file, floating point is"),
    _wrong("a norm of I64", _as(NORM, np.int64), f"{NORM}: int64 in the file"),
    _wrong("a norm of flags", _as(NORM, np.bool_), f"{NORM}: bool in the file"),
    _wrong("a norm of bytes", _as(NORM, np.uint8), f"{NORM}: uint8 in the file"),
    _wrong(
        "a tensor too many",
        tensors(lambda held: held.update({"model.mystery.weight": held[NORM]})),
        "1 not known: model.mystery.weight",
    ),
    _wrong("a tensor is missing", tensors(lambda held: held.pop(NORM)), f"1 missing: {NORM}"),
    _wrong(
        "a tensor of another shape",
        tensors(lambda held: held.update({NORM: held[NORM][1:]})),
        f"1 of the wrong shape: {NORM}",
    ),
    _wrong("untied without a head", tensors(lambda held: held.pop(HEAD)), f"1 missing: {HEAD}"),
)

TEMPLATES = (
    Mutation("a chat template is a named pipe", _template, ConfigError, "tool_use.jinja: a named pipe, not a file"),
)
MUTATIONS = (*TEMPLATES, *_special(), *_json(), *INDEXES, *HEADERS, *NUMBERS)
