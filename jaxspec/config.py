"""Config files: TOML to frozen records, strictly, with single values changed from the command line."""

import json
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jaxspec.errors import ConfigError

Record = TypeVar("Record", bound=msgspec.Struct)


def shipped(folder: str) -> Path:
    """Returns a folder of ``configs/``, which lies next to the package in a checkout and inside it in a wheel.

    Raises:
      ConfigError: this installation came without it.
    """
    package = Path(__file__).resolve().parent
    for parent in (package, package.parent):
        if (parent / "configs" / folder).is_dir():
            return parent / "configs" / folder
    raise ConfigError(f"configs/{folder} is missing in this installation; give the path of a file of your own")


def find_config(name: str, folder: str) -> Path:
    """Returns the file of a shipped name (``eagle3``) or of a path that ends in ``.toml``.

    Raises:
      ConfigError: there is none; the shipped names are listed.
    """
    known = {file.stem: file for file in sorted(shipped(folder).glob("*.toml"), key=lambda file: file.stem)}
    file = Path(name) if name.endswith(".toml") else known.get(name)
    if file is None or not file.is_file():
        raise ConfigError(
            f"{name}: no such file, and not one of the names that ship in configs/{folder}: {', '.join(known)}"
        )
    return file


def read_toml(file: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the values of a file and changes some of them.

    Args:
      file: TOML.
      changes: ``table.key=value`` each, the value in TOML; anything else is taken as text.

    Raises:
      ConfigError: the file cannot be read, or a change has no ``=`` or sets a key of a value that is no table.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as TOML ({error})") from error
    for change in changes:
        set_value(values, change)
    return values


def set_value(values: dict[str, Any], change: str) -> None:
    """Makes one change of ``read_toml``'s in place; errors as there."""
    name, equals, text = change.partition("=")
    *tables, key = (part.strip() for part in name.split("."))
    if not equals or not key:
        raise ConfigError(f"--set {change}: write table.key=value, for example train.steps=100")
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {change}: {table} is a value, not a table")
    try:
        values[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text.strip()[:1] in ("[", "{"):
            raise ConfigError(
                f"--set {change}: not TOML ({error}); texts inside need quotes, which the shell takes away unless the "
                f"whole is quoted too: --set '{name.strip()}={_quoted(text.strip())}'"
            ) from None
        values[key] = text


def _quoted(text: str) -> str:
    """Returns a list as it was probably meant, its bare words in quotes."""
    if not (text.startswith("[") and text.endswith("]")):
        return '["some text"]' if text.startswith("[") else '{key = "some text"}'
    words = (word.strip().strip("\"'") for word in text[1:-1].split(","))
    return f"[{', '.join(json.dumps(word, ensure_ascii=False) for word in words if word)}]"


def to_record(values: Mapping[str, Any], kind: type[Record], name: str) -> Record:
    """Converts values to a record.

    Raises:
      ConfigError: keys are unknown (all are named, with the known ones), missing or of another type, or the record
        refuses their values.
    """
    unknown = list(_unknown(values, kind, ""))
    if unknown:
        raise ConfigError(f"{name}: {'; '.join(unknown)}")
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{name}: {error}") from None


def _unknown(values: Mapping[str, Any], kind: type, path: str) -> typing.Iterator[str]:
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            yield f"unknown key {path}{key}; known {f'in [{path[:-1]}] ' if path else ''}are {', '.join(hints)}"
            continue
        inner = next((part for part in _parts(hints[key]) if _is_record(part)), None)
        if inner is not None and isinstance(value, Mapping):
            yield from _unknown(value, inner, f"{path}{key}.")


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def differences(was: Any, now: Any, show: Callable[[Any], str] = repr) -> list[str]:
    """Says what differs between two nested mappings; names are joined with dots, values written by ``show``."""
    first, second = _flat(was), _flat(now)
    return [
        f"{name} was {show(first.get(name))} and is {show(second.get(name))}"
        for name in sorted(first | second)
        if first.get(name) != second.get(name)
    ]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{name}.{key}" if name else str(key)).items()}
