"""Headers of GGUF files: metadata and where each tensor lies; a file that is not sound is refused with one error."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files.model_files import regular_file
from jaxspec.errors import CheckpointError, ConfigError

SUFFIX, MAGIC, VERSIONS = ".gguf", b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT, STRING, ARRAY = 6, 8, 9
MOST_KEYS, MOST_TENSORS, MOST_DIMENSIONS, MOST_FILES = 1 << 16, 1 << 20, 4, 1000
ALIGNMENT, MOST_ALIGNMENT = 32, 1 << 20
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufTensor:
    """The place of one tensor.

    Attributes:
      name: in the file.
      file: that holds it.
      type: name of its type, such as ``F32`` or ``Q4_K``.
      shape: with the axis that lies in a row of memory last, as numpy has it.
      begin, end: bytes in the file.
    """

    name: str
    file: Path
    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """What a file says before its numbers.

    Attributes:
      file: the first, where a model is split into several.
      metadata: values by key.
      tensors: by name.
    """

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def gguf_library() -> Any:
    """Returns the ``gguf`` library.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ConfigError(f"GGUF files need the gguf library ({error}); run: pip install gguf") from error
    return gguf


def read_gguf(file: Path) -> GgufHeader:
    """Reads the header of a file, and of all files of a split model, whose first one is given.

    Raises:
      CheckpointError: it is no regular file, no GGUF, truncated or corrupt, or one of several is missing.
      ConfigError: the ``gguf`` library is not installed.
    """
    header = _read_one(file)
    tensors = dict(header.tensors)
    for part in _other_parts(file, header.metadata):
        for name, tensor in _read_one(part).tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part}: holds {name}, as {tensors[name].file.name} does; download it again")
            tensors[name] = tensor
    promised = header.metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CheckpointError(f"{file}: its parts hold {len(tensors)} tensors, it promises {promised}")
    return GgufHeader(file, header.metadata, tensors)


def _other_parts(file: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """Returns the further files of a split model."""
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or count in (0, 1):
        return []
    match = PART.search(file.name)
    if match is None or int(match[2]) != count or int(match[1]) != 1 or count > MOST_FILES:
        first = f"{PART.sub('', file.name) if match else 'NAME'}-00001-of-{count:05d}.gguf"
        raise CheckpointError(f"{file}: one of {count} files of a split model; give the first, {first}")
    stem = file.name[: match.start()]
    return [file.with_name(f"{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(2, count + 1)]


def _read_one(file: Path) -> GgufHeader:
    real, size = regular_file(file)
    return _read(file, size, real.stat().st_mtime_ns)


@lru_cache(maxsize=4)  # config, tokenizer and tensors ask for it one after another
def _read(file: Path, size: int, _changed: int) -> GgufHeader:
    if size < len(MAGIC):
        raise CheckpointError(f"{file}: {size} bytes, which is no GGUF file; download it again")
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(file, _Cursor(data))
        except _Damage as damage:
            raise CheckpointError(f"{file}: {damage}; download it again") from None


class _Damage(Exception):
    """What is wrong with a header."""


class _Cursor:
    """Reads one value after another from the bytes of a file."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at, self.size = data, 0, len(data)

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise _Damage(f"truncated: {count} bytes are needed at byte {self.at}, the file has {self.size}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self, what: str) -> str:
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise _Damage(f"{what} at byte {self.at} is not UTF-8") from None

    def count(self, what: str, most: int) -> int:
        value = self.number("Q")
        if value > most:
            raise _Damage(f"{value} {what}, at most {most} are possible")
        return value

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            # Metadata may hold bytes that are no text; they are shown, not refused.
            return self.take(self.number("Q")).decode("utf-8", "replace")
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise _Damage(f"metadata {key!r} is of the unknown kind {kind}")
        value = self.number(SCALARS[kind])
        # The shortest decimal of a float32, so that 1e-5 is what was meant by it.
        return float(str(np.float32(value))) if kind == FLOAT else value

    def _array(self, key: str) -> list[Any]:
        kind = self.number("I")
        if kind == STRING:
            return [self.value(STRING, key) for _ in range(self.count(f"texts of {key!r}", self.size // 8))]
        if kind not in SCALARS:
            raise _Damage(f"metadata {key!r} is an array of the unknown kind {kind}")
        each = struct.calcsize(f"<{SCALARS[kind]}")
        count = self.count(f"numbers of {key!r}", self.size // each)
        return list(struct.unpack(f"<{count}{SCALARS[kind]}", self.take(count * each)))


def _parse(file: Path, cursor: _Cursor) -> GgufHeader:
    if cursor.take(len(MAGIC)) != MAGIC:
        raise _Damage(f"does not start with {MAGIC.decode()}, so it is no GGUF file")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise _Damage(f"GGUF version {version} (or big-endian); read are versions {VERSIONS[0]} and {VERSIONS[1]}")
    tensors, keys = cursor.count("tensors", MOST_TENSORS), cursor.count("keys", MOST_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.text("a key")
        if key in metadata:
            raise _Damage(f"metadata {key!r} is there twice")
        metadata[key] = cursor.value(cursor.number("I"), key)
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment % 8 or not 8 <= alignment <= MOST_ALIGNMENT:
        raise _Damage(f"an alignment of {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(file, metadata, _placed(file, entries, start, alignment, cursor.size))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Reads name, shape, type and offset of one tensor."""
    name = cursor.text("the name of a tensor")
    dimensions = cursor.number("I")
    if not name.isprintable() or not 1 <= dimensions <= MOST_DIMENSIONS:
        raise _Damage(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _placed(
    file: Path, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """Finds the bytes of each tensor; they lie within the file and apart from one another."""
    sizes = {int(kind): (kind.name, *each) for kind, each in gguf_library().GGML_QUANT_SIZES.items()}
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise _Damage(f"tensor {name!r} is there twice")
        if kind not in sizes:
            raise _Damage(f"tensor {name!r} is of type {kind}, which the gguf library here does not know")
        word, block, block_bytes = sizes[kind]
        if shape[-1] % block or not all(shape) or offset % alignment:
            raise _Damage(f"tensor {name!r} of shape {shape} at {offset} is not made of blocks of {word}")
        begin = start + offset
        end = begin + math.prod(shape) // block * block_bytes
        if end > size:
            raise _Damage(f"truncated: {name!r} ends at byte {end}, the file has {size}")
        tensors[name] = GgufTensor(name, file, word, shape, begin, end)
    last = start
    for tensor in sorted(tensors.values(), key=lambda t: t.begin):
        if tensor.begin < last:
            raise _Damage(f"tensor {tensor.name!r} overlaps another")
        last = tensor.end
    return tensors
