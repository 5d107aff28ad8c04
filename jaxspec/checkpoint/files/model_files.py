"""Files of a model directory: only regular ones that lie in it are opened, and JSON is read with care."""

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from jaxspec.errors import CheckpointError, ConfigError

MOST_JSON_BYTES = 100_000_000  # as the safetensors library has it for headers
LFS_POINTER = b"version https://git-lfs"
LFS_BYTES = 1024
# What transformers reads next to the weights, and opens without checking what it is.
TEXT_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"
KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip

Kind = type[CheckpointError] | type[ConfigError]


def file_in(directory: Path, name: str, kind: Kind = CheckpointError) -> Path:
    """Returns a file of a model directory, after a look at what it is.

    A link may lead to another place of the directory, or from the hub's cache to its blobs
    (``snapshots/REVISION/FILE`` to ``blobs/HASH``), and nowhere else.

    Raises:
      CheckpointError, ConfigError: it is not there, not a regular file, outside of the directory, or a git-lfs pointer.
    """
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts:
        raise kind(
            f"{directory}: {_short(name)!r} is not the name of a file in it; files of a model lie in its directory"
        )
    file = directory / name
    real, _ = regular_file(file, kind)
    home = Path(os.path.realpath(directory))
    if not any(real.is_relative_to(folder) for folder in (home, *_blobs(home))):
        raise kind(
            f"{_short(file)}: a link out of the model directory, to {_short(real)}; copy the file or make a hard link, "
            "or give the directory that it lies in"
        )
    return file


def regular_file(file: Path, kind: Kind = CheckpointError) -> tuple[Path, int]:
    """Returns where a file really lies and its size in bytes, without opening what is no regular file.

    Raises:
      CheckpointError, ConfigError: it is not there, not a regular file, not readable, or a git-lfs pointer.
    """
    try:
        real = Path(os.path.realpath(file, strict=True))
        status = real.stat()
        mode = stat.S_IFMT(status.st_mode)
        if mode != stat.S_IFREG:
            raise kind(
                f"{_short(file)}: {KINDS.get(mode, 'something else')}, not a file; a model's files are regular ones"
            )
        head = _head(real, status.st_size)
    except (OSError, ValueError) as error:
        raise kind(f"{_short(file)}: {_why(file, error)}") from None
    if head.startswith(LFS_POINTER):
        raise kind(
            f"{file}: a git-lfs pointer, not the file itself; run git lfs pull in its directory, or download it again"
        )
    return real, status.st_size


def check_text_files(directory: Path) -> None:
    """Makes sure that what transformers would open of a directory are regular files in it.

    Raises:
      ConfigError: see ``file_in``.
    """
    templates = [f"{TEMPLATES}/{file.name}" for file in (directory / TEMPLATES).glob("*")]
    for name in (*TEXT_FILES, *templates):
        if os.path.lexists(directory / name):
            file_in(directory, name, ConfigError)


def read_json(file: Path, kind: Kind = ConfigError) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
      CheckpointError, ConfigError: it cannot be read, is larger than 100 MB, or is no JSON object.
    """
    size = regular_file(file, kind)[1]
    if size > MOST_JSON_BYTES:
        raise kind(f"{file}: {size} bytes, JSON files of models have at most {MOST_JSON_BYTES}; download it again")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise kind(f"{file}: {_why(file, error)}") from None
    return parse_json(data, str(file), kind)


def parse_json(data: bytes, name: str, kind: Kind = ConfigError) -> dict[str, Any]:
    """Returns a JSON object from its bytes.

    Raises:
      CheckpointError, ConfigError: it is not UTF-8, not JSON, nested too deeply, no object, or gives a key two values.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise kind(f"{name}: not readable as JSON (not UTF-8 at byte {error.start}); download it again") from None
    except ValueError as error:
        raise kind(f"{name}: not readable as JSON ({error})") from None
    except RecursionError:
        raise kind(f"{name}: not readable as JSON (nested too deeply); download it again") from None
    if not isinstance(value, dict):
        raise kind(f"{name}: a JSON object is needed, got {type(value).__name__}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    """Makes an object; refuses a key with two values, for readers disagree on which would count."""
    made = dict(pairs)
    if len(made) < len(pairs):
        # NaN differs from itself, and is written the same.
        twice = next((key for key, value in pairs if repr(made[key]) != repr(value)), None)
        if twice is not None:
            raise ValueError(f"the key {_short(twice)!r} has two values")
    return made


def _blobs(home: Path) -> tuple[Path, ...]:
    """Returns where files of a directory of the hub's cache may lie: with its repository, or shared by all."""
    snapshots = next((folder for folder in home.parents if folder.name == "snapshots"), None)
    return () if snapshots is None else (snapshots.parent / "blobs", snapshots.parent.parent / "blobs")


def _head(file: Path, size: int) -> bytes:
    """Returns the first bytes of a small file; git-lfs pointers are small."""
    if size > LFS_BYTES:
        return b""
    with file.open("rb") as handle:
        return handle.read(len(LFS_POINTER))


def _why(file: Path, error: OSError | ValueError) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ENOENT:
        return "a link to a file that is not there" if os.path.islink(file) else "not there"
    if code == errno.ELOOP:
        return "a link that leads back to itself"
    words = error.strerror if isinstance(error, OSError) else str(error)
    return f"cannot be read ({words})"


def _short(name: object, most: int = 200) -> str:
    text = str(name)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
