"""Tile sizes of kernels: what the tuner measured on this card, and each operation's safe default elsewhere."""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jax

T = TypeVar("T")


class BadTiles(ValueError):
    """A file of measured tile sizes is not what the kernels can read."""


@dataclass(frozen=True)
class Key:
    """What tile sizes depend on.

    Attributes:
      shape: sizes that matter, in the operation's own words, such as ``D2048 F768 E128``; never the number of rows of
        a decoding step, because a row's result must not depend on it.
      form: how the weights or the cache are stored, such as ``bfloat16`` or ``mxfp4``.
    """

    shape: str
    form: str


@dataclass(frozen=True)
class Measured:
    """One entry of ``configs/kernels/<op>.toml``.

    Attributes:
      card: device kind as JAX names it.
      shape, form: see ``Key``.
      date: of the measurement, ISO.
      command: that measured.
      time_us: per call, summed over the cases of this shape.
      default_time_us: the same with the operation's default; of a Mosaic kernel, the time of Triton's.
      tiles: fields of the operation's record of tile sizes that differ from its default.
    """

    card: str
    shape: str
    form: str
    date: str
    command: str
    time_us: float
    default_time_us: float
    tiles: Mapping[str, Any]


def look_up(op: str, default: T, *, shape: str, form: str) -> T:
    """Tile sizes for one shape of an operation on the card that this process computes on.

    Args:
      op: name of its folder.
      default: a frozen dataclass of whole numbers, or of such dataclasses; what is not measured keeps its value.
      shape: see ``Key``.
      form: see ``Key``.

    Raises:
      BadTiles: the operation's file has unknown names or values of the wrong type.
    """
    key, trial, listener = Key(shape, form), _trial.get(), _listener.get()
    if listener is not None and listener[0] == op:
        listener[1].append((key, default))
        return default
    if trial is not None and trial[0] == op:
        return trial[1]
    entry = measurement(op, key)
    return default if entry is None else changed(default, entry.tiles, f"{op}: tiles of {shape} {form}")


def measurement(op: str, key: Key) -> Measured | None:
    """Returns what was measured for a shape of an operation on the card that this process computes on, if anything."""
    known = measured(op)
    here = card() if known else ""
    return next((m for m in known if (m.card, m.shape, m.form) == (here, key.shape, key.form)), None)


def faster(op: str, key: Key) -> str:
    """Returns the measurement by which a Mosaic kernel takes the place of Triton's on this card, empty if none."""
    entry = measurement(op, key)
    if entry is None or entry.time_us >= entry.default_time_us:
        return ""
    return f"measured on {entry.date}: {entry.time_us:.0f} us, Triton {entry.default_time_us:.0f}"


_trial: ContextVar[tuple[str, Any] | None] = ContextVar("trial", default=None)
_listener: ContextVar[tuple[str, list[tuple[Key, Any]]] | None] = ContextVar("listener", default=None)


@contextmanager
def trying(op: str, tiles: Any) -> Iterator[None]:
    """Makes every look-up of one operation return ``tiles`` while programs are traced."""
    token = _trial.set((op, tiles))
    try:
        yield
    finally:
        _trial.reset(token)


@contextmanager
def listening(op: str) -> Iterator[list[tuple[Key, Any]]]:
    """Yields what one operation looks up while programs are traced, with its defaults, which it gets."""
    asked: list[tuple[Key, Any]] = []
    token = _listener.set((op, asked))
    try:
        yield asked
    finally:
        _listener.reset(token)


on_card = jax.make_user_context("")
"""``with on_card(kind):`` makes look-ups those of a card that need not be here; JAX traces programs anew for each."""


def card() -> str:
    """Device kind of the GPU that programs are for: this process's by default; empty without one."""
    return on_card.value or _card_here()


@cache
def _card_here() -> str:
    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else ""


def folder() -> Path:
    """Returns the directory of the files: inside jaxspec in an installed wheel, next to the packages in a checkout."""
    root = Path(__file__).resolve().parent.parent
    inside = root / "jaxspec" / "configs" / "kernels"
    return inside if inside.is_dir() else root / "configs" / "kernels"


@cache
def measured(op: str) -> tuple[Measured, ...]:
    """Everything measured for an operation; nothing where there is no file.

    Raises:
      BadTiles: the file is not readable.
    """
    file = folder() / f"{op}.toml"
    return parse(file.read_text(encoding="utf-8"), str(file)) if file.exists() else ()


def parse(text: str, name: str) -> tuple[Measured, ...]:
    """Reads the text of a file strictly.

    Args:
      text: TOML, one table ``[[measured]]`` per entry.
      name: of the file, for errors.

    Raises:
      BadTiles: it is no TOML, names are missing or unknown, or one shape is there twice for one card.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadTiles(f"{name}: not readable as TOML ({error})") from None
    entries = content.get("measured")
    if set(content) != {"measured"} or not isinstance(entries, list):
        raise BadTiles(f"{name}: the only name at the top is the list measured, got {sorted(content)}")
    types = {"time_us": (int, float), "default_time_us": (int, float), "tiles": dict}
    wanted = {f.name: types.get(f.name, str) for f in fields(Measured)}
    for number, entry in enumerate(entries):
        wrong = sorted(set(entry) ^ set(wanted))
        wrong += sorted(n for n in wanted.keys() & entry.keys() if not isinstance(entry[n], wanted[n]))
        if wrong:
            raise BadTiles(f"{name}: entry {number}: {', '.join(wrong)} missing, unknown or of the wrong type")
    read = tuple(Measured(**entry) for entry in entries)
    keys = [(m.card, m.shape, m.form) for m in read]
    twice = sorted({" ".join(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise BadTiles(f"{name}: more than one entry for {', '.join(twice)}; keep the faster one")
    return read


def changed(default: T, values: Mapping[str, Any], where: str) -> T:
    """A record of tile sizes with some of its fields replaced.

    Raises:
      BadTiles: a name is not one of its fields, or a value is not a whole number of at least 1.
    """
    record: Any = default
    known = {f.name: getattr(record, f.name) for f in fields(record)}
    new: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise BadTiles(f"{where}: {name} is not known; known are {', '.join(known)}")
        if is_dataclass(known[name]) and isinstance(value, Mapping):
            new[name] = changed(known[name], value, f"{where}: {name}")
        elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            new[name] = value
        else:
            raise BadTiles(f"{where}: {name} must be a whole number of at least 1, got {value!r}")
    return replace(record, **new)
