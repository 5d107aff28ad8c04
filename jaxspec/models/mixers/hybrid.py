"""Layers of several kinds from a published config: which mixer each layer has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models.arch import MixerSpec, NoMixer
from jaxspec.models.mixers.gqa import FULL
from jaxspec.models.read import Config, Reader, short

LINEAR, ROUTED, DENSE = "linear_attention", "moe", "mlp"


@dataclass(frozen=True)
class NoMixerRow:
    """Of a layer that has a feed-forward alone."""

    def spec(self, read: Reader, layer: int) -> NoMixer:
        """Returns nothing."""
        return NoMixer()


@dataclass(frozen=True)
class HybridRow:
    """Reads the kinds of layers: a list or a text of letters, numbers of layers, or how often one is full.

    Attributes:
      rows: mixer rows by kind.
      lists: keys of the list, the first present one counts.
      names: kinds by other names, letters or numbers of the list.
      interval: key of how often a full layer comes, the last of so many, where no list says.
      other: kind of the layers between.
      numbered: keys, one inside the other, of the numbers of the full layers, counted from 1.
    """

    rows: Mapping[str, Any]
    lists: tuple[str, ...] = ("layer_types",)
    names: Mapping[str | int, str] = field(default_factory=dict)
    interval: str | None = None
    other: str = LINEAR
    numbered: tuple[str, str] | None = None

    def spec(self, read: Reader, layer: int) -> MixerSpec:
        """Mixer of one layer."""
        return self.rows[self.kind(read, layer)].spec(read, layer)

    def spec_of(self, read: Reader, kind: str) -> MixerSpec:
        """Mixer of the first layer of a kind, also where there is none."""
        count = read.count("num_hidden_layers")
        return self.rows[kind].spec(read, next((y for y in range(count) if self.kind(read, y) == kind), count))

    def listed(self, config: Config) -> Sequence[Any] | None:
        """Returns the list of kinds, None without one."""
        values = (config.get(key) for key in self.lists)
        return next((kinds for kinds in values if kinds and isinstance(kinds, list | tuple | str)), None)

    def kind(self, read: Reader, layer: int) -> str:
        """Returns the kind of a layer.

        Raises:
          ConfigError: the list names unknown kinds, or too few.
        """
        kinds, count = self.listed(read.config), read.count("num_hidden_layers")
        read.asked |= {*self.lists, *([self.interval] if self.interval else ())}
        full = None if self.numbered is None else self._numbers(read, *self.numbered)
        if kinds is None:
            if full is not None:
                return FULL if layer + 1 in full else self.other
            if self.interval is None:
                read.missing.append(" or ".join(self.lists))
                return FULL
            return self.other if (layer + 1) % read.count(self.interval, default=4) else FULL
        named: list[Any] = [self.names.get(kind, kind) if isinstance(kind, str | int) else kind for kind in kinds]
        if len(named) < count or any(not isinstance(kind, str) or kind not in self.rows for kind in named):
            known = sorted(map(str, {*self.rows, *self.names}))
            raise ConfigError(
                f"config: {' or '.join(self.lists)} must name {', '.join(known)} for each of the {count} layers, got "
                f"{short(kinds)}"
            )
        return named[min(layer, len(named) - 1)]

    @staticmethod
    def _numbers(read: Reader, outer: str, inner: str) -> Sequence[int] | None:
        numbers = read.mapping(outer).get(inner)
        if numbers is not None and not (isinstance(numbers, list) and all(isinstance(n, int) for n in numbers)):
            raise ConfigError(f"config: {outer}.{inner} must be a list of layer numbers from 1, got {short(numbers)}")
        return numbers
