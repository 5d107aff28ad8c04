"""Reads a published config: keys with defaults, every missing one remembered, and both dialects of rotation."""

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.nn.rope import RopeScaling, RopeSpec

Config = Mapping[str, Any]
SCALINGS = ("default", "linear", "llama3", "yarn")


class Reader:
    """Reads keys with defaults and remembers every missing one, so that all are reported at once."""

    def __init__(self, config: Config, defaults: Mapping[str, Any]):
        self.config, self.defaults, self.missing = config, defaults, []

    def get(self, *keys: str, default: Any = ...) -> Any:
        """Value of the first key that is there and not null; without any, a default, or 1 and a missing key."""
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

    def count(self, *keys: str, default: Any = ...) -> int:
        """A whole number of at least 1.

        Raises:
          ConfigError: the value is another.
        """
        value = self.get(*keys, default=default)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"config: {keys[0]} must be a whole number of at least 1, got {value!r}")
        return value

    def flag(self, value: bool | str) -> bool:
        """A fixed answer, or that of a key."""
        return bool(self.get(value, default=False)) if isinstance(value, str) else value

    def number(self, value: float | str) -> float:
        """A fixed number, or that of a key (1 where it is missing)."""
        return float(self.get(value, default=1.0)) if isinstance(value, str) else value


def scaling_of(read: Reader) -> dict[str, Any]:
    """Rotation settings of either dialect: hub ``rope_scaling``, or transformers 5 ``rope_parameters``."""
    nested = read.get("rope_parameters", default=None) or {}
    scaling = read.get("rope_scaling", default=None) or {}
    if not isinstance(scaling, Mapping) or not isinstance(nested, Mapping):
        raise ConfigError(f"config: rope_scaling must be an object, got {scaling or nested!r}")
    return {**scaling, **nested}


def rope_of(read: Reader, head_dim: int, *, interleaved: bool = False, last: bool = False) -> RopeSpec:
    """Rotation of a head: hub ``rope_theta`` + ``rope_scaling``, or transformers 5 ``rope_parameters``."""
    scaling = scaling_of(read)
    theta = float(scaling.get("rope_theta") or read.get("rope_theta", default=10000.0))
    part = scaling.get("partial_rotary_factor") or read.get("partial_rotary_factor", default=1.0)
    dim = int(read.get("rotary_dim", default=int(head_dim * float(part))))
    return RopeSpec(theta, dim, interleaved, last, scaled(read, scaling))


def scaled(read: Reader, scaling: Mapping[str, Any]) -> RopeScaling | None:
    """Context extension by its published settings."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in SCALINGS:
        raise ConfigError(f"config: rope scaling {kind!r} is not known; known are {', '.join(SCALINGS)}")
    if kind == "default":
        return None
    original = scaling.get("original_max_position_embeddings") or read.count("max_position_embeddings")
    if scaling.get("factor") is None:
        read.missing.append("rope_scaling.factor")
    names = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    low, high = (scaling.get(name) for name in names)
    return RopeScaling(
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        original=int(original),
        low=float(low if low is not None else 1.0),
        high=float(high if high is not None else (4.0 if kind == "llama3" else 32.0)),
        attention_factor=_attention_factor(scaling),
        truncate=bool(scaling.get("truncate", True)),
    )


def _attention_factor(scaling: Mapping[str, Any]) -> float | None:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    one, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not one or not all_dim:
        return None
    return yarn_scale(scaling, one) / yarn_scale(scaling, all_dim)


def yarn_scale(scaling: Mapping[str, Any], mscale: float) -> float:
    """``0.1 s ln(factor) + 1`` (YaRN, Peng 2023)."""
    return 0.1 * float(mscale) * math.log(max(float(scaling.get("factor") or 1.0), 1.0)) + 1
