"""Reads a published config: keys with defaults and bounds, remembering which were asked for and which are missing."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import ConfigError

Config = Mapping[str, Any]
LONGEST_VALUE = 80  # characters of a value in a message
POSITIONS = 2**31 - 1
# The most that a count may be where that is not ``MOST``: sizes beyond these are damage, not models.
MOST = 2**20
BOUNDS = {
    "num_hidden_layers": 2000,
    "num_nextn_predict_layers": 100,
    "vocab_size": 2**24,
    "intermediate_size": 2**24,
    "ffn_dim": 2**24,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
    "n_shared_experts": 2**10,
    "max_position_embeddings": POSITIONS,
    "original_max_position_embeddings": POSITIONS,
    "sliding_window": POSITIONS,
    "index_topk": POSITIONS,
}

Switch = str | bool  # the key of an answer, or the answer


class Reader:
    """Reads keys with defaults; remembers every missing one, so that all are reported at once, and every key asked for.

    Attributes:
      config: the published config.
      defaults: values of keys that may be left out.
      missing: keys that are needed and not there.
      asked: keys that were asked for, there or not.
    """

    def __init__(self, config: Config, defaults: Mapping[str, Any]):
        self.config, self.defaults = config, defaults
        self.missing: list[str] = []
        self.asked: set[str] = set()

    def get(self, *keys: str, default: Any = ...) -> Any:
        """Value of the first key that is there and not null; without any, a default, or 1 and a missing key."""
        self.asked.update(keys)
        for key in keys:
            if self.config.get(key) is not None:
                return self.config[key]
        for key in keys:
            if key in self.defaults:
                return self.defaults[key]
        if default is ...:
            self.missing.append(" or ".join(keys))
            return 1
        return default

    def count(self, *keys: str, default: Any = ..., least: int = 1) -> int:
        """A whole number of at least ``least``, and at most what ``BOUNDS`` allows.

        Raises:
          ConfigError: the value is another.
        """
        return checked_count(keys[0], self.get(*keys, default=default), least)

    def count_at(self, layer: int, *keys: str) -> int:
        """A whole number of one layer: the same for all, or from a list with one for each.

        Raises:
          ConfigError: the value is another, or the list too short.
        """
        value, key = self.get(*keys), self.present(*keys)
        if isinstance(value, list) and value:
            count = self.count("num_hidden_layers")
            if len(value) < count and not self.missing:
                raise ConfigError(f"config: {key} must state one number for each of {count} layers, got {short(value)}")
            value = value[min(layer, len(value) - 1)]
        return checked_count(key, value)

    def bound_at(self, layer: int, key: str) -> float | None:
        """A bound in one layer: the same for all, or from a list, in which null and 0 mean none; None without any.

        Raises:
          ConfigError: the value is another, or the list too short.
        """
        value = self.get(key, default=None)
        if isinstance(value, list | tuple):
            count = max(self.count("num_hidden_layers"), layer + 1)
            if value and len(value) < count and not self.missing:
                raise ConfigError(f"config: {key} must state a bound for each of {count} layers, got {short(value)}")
            value = value[min(layer, len(value) - 1)] or None if value else None
        return None if value is None else checked_real(key, value)

    def real(self, *keys: str, default: Any = ..., above: float = 0.0, most: float = 1e30) -> float:
        """A finite number; see ``checked_real``."""
        return checked_real(keys[0], self.get(*keys, default=default), above, most)

    def least(self, key: str, least: float) -> float:
        """A finite number of at least so much, which it is where the key is missing."""
        return checked_real(key, self.get(key, default=least), least=least)

    def flag(self, value: Switch, *, default: bool = False) -> bool:
        """A fixed answer, or that of a key.

        Raises:
          ConfigError: the key's value is neither true nor false.
        """
        if not isinstance(value, str):
            return value
        answer = self.get(value, default=default)
        if not isinstance(answer, bool | int) or answer not in (0, 1):
            raise ConfigError(f"config: {value} must be true or false, got {short(answer)}")
        return bool(answer)

    def present(self, *keys: str) -> str:
        """Returns the first key that is there and not null, or the first of all."""
        self.asked.update(keys)
        return next((key for key in keys if self.config.get(key) is not None), keys[0])

    def number(self, value: float | str) -> float:
        """A fixed number, or that of a key (1 where it is missing)."""
        return self.real(value, default=1.0) if isinstance(value, str) else value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object, empty where the key is missing or null.

        Raises:
          ConfigError: the value is no object.
        """
        value = self.get(key, default=None)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"config: {key} must be an object or null, got {short(value)}")
        return value

    def kinds(self, key: str, known: tuple[str, ...], count: int) -> list[str] | None:
        """Reads what a list says about each of the layers, None where the key is missing or null.

        Raises:
          ConfigError: it is no list, it names unknown kinds, or fewer than there are layers.
        """
        value = self.get(key, default=None)
        if value is None:
            return None
        fits = isinstance(value, list | tuple) and all(isinstance(kind, str) and kind in known for kind in value)
        if not fits or (len(value) < count and not self.missing):
            raise ConfigError(
                f"config: {key} must name {' or '.join(known)} for each of the {count} layers, got {short(value)}"
            )
        return list(value)

    def pattern(self, key: str, *names: str) -> list[str] | None:
        """Reads a list of numbers of kinds, one for each of the layers; None where the key is missing or null.

        Raises:
          ConfigError: it is no list, has other numbers or fewer than there are layers.
        """
        value, count = self.get(key, default=None), self.count("num_hidden_layers")
        if value is None:
            return None
        fits = isinstance(value, list | tuple) and all(one in range(len(names)) for one in value)
        if not fits or (len(value) < count and not self.missing):
            meaning = " or ".join(f"{number} ({name})" for number, name in enumerate(names))
            raise ConfigError(f"config: {key} must say {meaning} for each of the {count} layers, got {short(value)}")
        return [names[one] for one in value]

    def layers(self, key: str) -> Sequence[int] | None:
        """Reads a list of layer numbers, or a text of them between commas; None where the key is missing or null.

        Raises:
          ConfigError: it is another value.
        """
        value = self.get(key, default=None)
        if isinstance(value, str) and all(number.strip().isdecimal() for number in value.split(",")):
            value = [int(number) for number in value.split(",")]
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(y, int) for y in value)):
            raise ConfigError(f"config: {key} must be a list of layer numbers, got {short(value)}")
        return value

    def is_null(self, key: str) -> bool:
        """Whether a key is there and says null, which is not the same as a default."""
        return key in self.config and self.config[key] is None


def checked_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number within the bounds of its key.

    Raises:
      ConfigError: it is another.
    """
    most = BOUNDS.get(name, MOST)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"config: {name} must be a whole number of at least {least}, got {short(value)}")
    if value > most:
        raise ConfigError(f"config: {name} must be at most {most}, got {short(value)}; is the file damaged?")
    return value


def checked_real(name: str, value: Any, above: float = 0.0, most: float = 1e30, *, least: float | None = None) -> float:
    """A finite number, also where it is written as a string.

    Args:
      name: of the key.
      value: from the config.
      above: what it must exceed.
      most: what it must not exceed.
      least: the least value, where that itself is allowed; instead of ``above``.

    Raises:
      ConfigError: it is another.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    enough = number > above if least is None else number >= least
    if not enough or not number <= most:
        low = f"above {above:g}" if least is None else f"of at least {least:g}"
        raise ConfigError(f"config: {name} must be a finite number {low} and at most {most:g}, got {short(value)}")
    return number


def short(value: Any) -> str:
    """A value as messages show it, on one line and not too long."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."
