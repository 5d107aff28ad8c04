"""A command's arguments: a dataclass becomes a parser whose help is grouped, with one default each."""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

T = TypeVar("T")
PLAIN_GROUP = ""
METAVARS = {str: "STR", int: "INT", float: "FLOAT", Path: "PATH"}
HELP_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")


@dataclass(frozen=True)
class Argument:
    """One argument of a command.

    Attributes:
      path: names of the fields that lead to it, its own last.
      group: title of its group in the help, empty for the first one.
      annotation: its type with the help beside it.
      default: as ``dataclasses.field`` takes it.
    """

    path: tuple[str, ...]
    group: str
    annotation: Any
    default: dict[str, Any]


def parse(kind: type[T], args: Sequence[str], *, prog: str, description: str) -> T:
    """Parses a command line into the dataclass of its command.

    Fields that are dataclasses are flattened. A dataclass may say in ``GROUPS`` which of its fields stand under which
    title, and in ``GROUP`` the title of the others.
    """
    return build(kind, tyro.cli(parser_of(kind), prog=prog, args=args, description=description, config=CONFIG))


# None is a default, nothing that a user writes; what is off by default has no second flag that switches it off.
CONFIG = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)


def parser_of(kind: type) -> type:
    """Returns what tyro parses: the arguments of a command as one dataclass per group."""
    groups: dict[str, list[tuple[str, Any, Any]]] = {}
    for argument in arguments_of(kind):
        entry = (argument.path[-1], argument.annotation, field(**argument.default))
        groups.setdefault(argument.group, []).append(entry)
    entries_and_groups = groups.pop(PLAIN_GROUP, [])
    for title, entries in groups.items():
        group = make_dataclass(_field_name(title), entries, frozen=True)
        group.__doc__ = " "  # or tyro shows the signature
        named = Annotated[group, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title)]
        entries_and_groups.append((_field_name(title), named, field(default_factory=group)))
    return make_dataclass(kind.__name__, entries_and_groups, frozen=True)


def build(kind: type[T], parsed: Any) -> T:
    """Builds the dataclass of a command from what ``parser_of`` parsed."""
    values: dict[tuple[str, ...], Any] = {}
    for argument in arguments_of(kind):
        holder = getattr(parsed, _field_name(argument.group)) if argument.group else parsed
        values[argument.path] = getattr(holder, argument.path[-1])
    return _nest(kind, values)


def _nest(kind: type[T], values: dict[tuple[str, ...], Any]) -> T:
    inner = {}
    for name, hint in get_type_hints(kind).items():
        below = {path[1:]: value for path, value in values.items() if path[0] == name}
        if below:  # and not a constant of the class
            inner[name] = below[()] if () in below else _nest(_plain(hint), below)
    return kind(**inner)


def set_aside(args: Any, taken: Sequence[str]) -> list[str]:
    """Returns the flags that were given besides those that a way of running a command takes."""
    others = (f for f in fields(args) if f.name not in taken)
    return [f"--{f.name.replace('_', '-')}" for f in others if getattr(args, f.name) != f.default]


def arguments_of(kind: type, title: str = PLAIN_GROUP) -> Iterator[Argument]:
    """Yields every argument of a command, those of nested dataclasses among them."""
    hints, words = get_type_hints(kind, include_extras=True), help_of(kind)
    title = getattr(kind, "GROUP", title)
    groups = {name: group for group, names in getattr(kind, "GROUPS", {}).items() for name in names}
    for f in fields(kind):
        if is_dataclass(_plain(hints[f.name])):
            for inner in arguments_of(_plain(hints[f.name]), title):
                yield Argument((f.name, *inner.path), inner.group, inner.annotation, inner.default)
            continue
        default = {"default": f.default, "default_factory": f.default_factory}
        given = {name: value for name, value in default.items() if value is not MISSING}
        hint = hints[f.name]
        if given.get("default") is False:
            hint = tyro.conf.FlagCreatePairsOff[hint]
        about = words.get(f.name, "")
        shown: Any = "" if _unsaid(given.get("default"), about) else _hint
        annotation = Annotated[_many(hint), tyro.conf.arg(help=about, help_behavior_hint=shown)]
        yield Argument((f.name,), groups.get(f.name, title), annotation, given)


def help_of(kind: type) -> dict[str, str]:
    """Returns the help of each field, from the section ``Attributes`` of a docstring."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    words: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        entry = HELP_ENTRY.fullmatch(line.strip())
        if entry and len(line) - len(line.lstrip()) == 2:
            names = entry[1].split(", ")
            words |= dict.fromkeys(names, entry[2])
        else:
            words |= {name: f"{words[name]} {line.strip()}".strip() for name in names}
    return words


def _unsaid(default: Any, about: str) -> bool:
    """Whether a default need not be shown: there is none, or the help says what it means."""
    return default is None or default is False or default in ("", ()) or "by default" in about


def _hint(default: str) -> str:
    return f"(default: {({'True': 'on'}).get(default, default)})"


def _many(hint: Any) -> Any:
    """Names several values ``INT ...``, not ``[INT [INT ...]]``."""
    if get_origin(_plain(hint)) is not tuple or tyro.conf.Positional in getattr(hint, "__metadata__", ()):
        return hint
    inner = get_args(_plain(hint))[0]
    one = f"{{{','.join(map(str, get_args(inner)))}}}" if get_origin(inner) is Literal else METAVARS[inner]
    return Annotated[hint, tyro.conf.arg(metavar=f"{one} ...")]


def _plain(hint: Any) -> Any:
    """Returns a type without its annotations."""
    return _plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def _field_name(title: str) -> str:
    return "_".join(re.findall(r"\w+", title.lower()))
