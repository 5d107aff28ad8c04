"""Rotary settings of a published config, in the hub's dialect or that of transformers 5."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models.read import POSITIONS, Reader, checked_count, checked_real, short
from jaxspec.nn.rope import RopeScaling, RopeSpec

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
THETA = 10000.0  # where neither the config nor the family says, as in transformers
MOST_THETA = 1e15
# Settings with their least values; 0 means none where transformers reads it so.
REALS = {
    "factor": 1.0, "beta_fast": 0.0, "beta_slow": 0.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0,
    "attention_factor": 0.0, "mscale": 0.0, "mscale_all_dim": 0.0, "alpha": 1.0, "short_mscale": 0.0,
    "long_mscale": 0.0,
}  # fmt: skip
# Not those of mrope: text alone has one position for all of its sections.
TEMPERATURE = "llama_4_scaling_beta"
MECHANISMS = ("xdrope_section", "short_factor", "long_factor", "alpha", TEMPERATURE)
# And to which kind some of them belong.
OF_KINDS = {"alpha": "dynamic", "short_factor": "longrope", "long_factor": "longrope"}


def scaling_of(read: Reader, layer_kind: str | None = None, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Checked settings: hub ``rope_scaling``, or transformers 5 ``rope_parameters``, whose gaps the first fills.

    Args:
      read: the config.
      layer_kind: whose settings count where they are listed by kind of layer; None in a family without kinds.
      known: mechanisms among the settings that the caller honors.

    Raises:
      ConfigError: they are malformed, or there are none for this kind.
    """
    parameters, scaling = read.mapping("rope_parameters"), read.mapping("rope_scaling")
    if scaling and not read.config.get("rope_parameters"):
        parameters = {}  # and not those that the family has by default
    chosen = {k: v for k, v in parameters.items() if v is not None}
    theirs = {k: v for k, v in scaling.items() if v is not None}
    if _kind(theirs) != "default" and _kind(chosen) not in ("default", _kind(theirs)):
        raise ConfigError(
            f"config: rope_scaling says {_kind(theirs)!r} and rope_parameters {_kind(chosen)!r}; keep one of them"
        )
    # Who extends a context writes rope_scaling, also next to what transformers saved.
    settings = chosen | theirs if _kind(theirs) != "default" else theirs | chosen
    if _kind(theirs) != "default":
        settings |= {"rope_type": _kind(theirs)}
    nested = {k: v for k, v in settings.items() if isinstance(v, Mapping)}
    if nested:
        if layer_kind not in nested:
            whose = f"{layer_kind} layers" if layer_kind else "a family whose layers all turn alike"
            raise ConfigError(f"config: rope_parameters has settings for {sorted(nested)}, but none for {whose}")
        settings = {k: v for k, v in settings.items() if k not in nested} | dict(nested[layer_kind])
    return checked(settings, known)


def _kind(settings: Mapping[str, Any]) -> Any:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    return "yarn" if kind == "deepseek_yarn" else kind


def checked(settings: Mapping[str, Any], known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Settings whose values are of the types and within the bounds that their names promise; null ones are left out.

    Raises:
      ConfigError: a value is another, or nothing here reads it.
    """
    checked: dict[str, Any] = {k: v for k, v in settings.items() if v is not None}
    kind = _kind(checked)
    widened = kind == "dynamic" and "alpha" in checked  # the base alone: such frequencies do not change with the text
    if not widened and (not isinstance(kind, str) or kind not in SCALINGS):
        raise ConfigError(f"config: rope scaling {short(kind)} is not known; known are {', '.join(SCALINGS)}")
    if checked.get("factor", 1) != 1 and "rope_type" not in checked and "type" not in checked:
        raise ConfigError(
            f"config: rope_scaling has a factor of {short(checked['factor'])}, but no rope_type; known are "
            f"{', '.join(SCALINGS)}"
        )
    switched = [name for name in MECHANISMS if name in checked and name not in known and OF_KINDS.get(name) != kind]
    if switched:
        raise ConfigError(f"config: rope settings {switched} are of mechanisms that jaxspec does not have")
    for name in REALS.keys() & checked.keys():
        least = None if name == "attention_factor" else REALS[name]
        if kind != "default":
            checked[name] = checked_real(f"rope_scaling.{name}", checked[name], least=least, most=1e6)
    if "rope_theta" in checked:
        checked["rope_theta"] = _theta(checked["rope_theta"])
    if "original_max_position_embeddings" in checked:
        original = checked["original_max_position_embeddings"]
        checked["original_max_position_embeddings"] = checked_count("original_max_position_embeddings", original)
    if not isinstance(checked.get("truncate", True), bool):
        raise ConfigError(f"config: rope_scaling.truncate must be true or false, got {short(checked['truncate'])}")
    return checked


def _theta(value: Any) -> float:
    return checked_real("rope_theta", value, above=1.0, most=MOST_THETA)


def theta_of(read: Reader, settings: Mapping[str, Any], key: str = "rope_theta", default: float = THETA) -> float:
    """Base of the frequencies: that of the settings, else of the config, else of the family."""
    beside = read.get(key, default=default)
    return _theta(settings.get("rope_theta", beside))


def rope_of(
    read: Reader,
    head_dim: int,
    *,
    interleaved: bool = False,
    layer_kind: str | None = None,
    whole: bool = False,
    theta: str = "rope_theta",
    known: tuple[str, ...] = (),
) -> RopeSpec:
    """Rotation of a head: hub ``rope_theta`` + ``rope_scaling``, or transformers 5 ``rope_parameters``.

    Args:
      read: the config.
      head_dim: C.
      interleaved: layout of the pairs.
      layer_kind: see ``scaling_of``.
      whole: whether all of these channels turn, whatever part of a larger head they are.
      theta: key of the base, where the settings have none.
      known: see ``scaling_of``.

    Raises:
      ConfigError: settings are wrong, or the turned channels are not an even number of those of a head.
    """
    settings = scaling_of(read, layer_kind, known)
    base, scaling = theta_of(read, settings, theta), scaled(read, settings)
    part = settings.get("partial_rotary_factor", read.get("partial_rotary_factor", default=1.0))
    part = checked_real("partial_rotary_factor", part, most=1.0)
    if _kind(settings) == "proportional":
        return RopeSpec(base, head_dim, interleaved, turning=int(head_dim * part) // 2, scaling=scaling)
    dim = head_dim if whole else read.count("rotary_dim", default=int(head_dim * part), least=0)
    if (dim % 2 or not 2 <= dim <= head_dim) and not read.missing:
        raise ConfigError(
            f"config: an even number of each head's {head_dim} channels must turn, got {dim} (head_dim, "
            "partial_rotary_factor, rotary_dim)"
        )
    if scaling is not None and scaling.kind == "longrope" and not read.missing:
        for which, one in (("short", scaling), ("long", scaling.beyond or scaling)):
            if len(one.divisors) != dim // 2:
                raise ConfigError(
                    f"config: rope_scaling.{which}_factor must be {dim // 2} numbers, not {len(one.divisors)}"
                )
    base *= settings.get("alpha", 1.0) ** (dim / max(dim - 2, 1))
    return RopeSpec(base, dim, interleaved, scaling=scaling)


def scaled(read: Reader, settings: Mapping[str, Any]) -> RopeScaling | None:
    """Context extension by checked settings.

    Raises:
      ConfigError: llama3's bounds of frequencies are the wrong way round.
    """
    kind: Any = _kind(settings)
    if kind in ("default", "dynamic") or (kind == "proportional" and settings.get("factor", 1.0) == 1):
        return None
    if kind == "longrope":
        return _long(read, settings)
    original = settings.get("original_max_position_embeddings") or read.count("max_position_embeddings")
    if "factor" not in settings:
        read.missing.append("rope_scaling.factor")
    if kind == "llama3":
        low, high = settings.get("low_freq_factor", 1.0), settings.get("high_freq_factor", 4.0)
        if low > high:
            raise ConfigError(f"config: low_freq_factor must not exceed high_freq_factor, got {low:g} and {high:g}")
    else:
        low, high = settings.get("beta_slow") or 1.0, settings.get("beta_fast") or 32.0
    return RopeScaling(
        kind="linear" if kind == "proportional" else kind,
        factor=settings.get("factor", 1.0),
        original=original,
        low=low,
        high=high,
        attention_factor=_attention_factor(settings),
        truncate=settings.get("truncate", True),
    )


def _long(read: Reader, settings: Mapping[str, Any]) -> RopeScaling:
    """LongRoPE within the original context, and what turns every position of longer texts instead."""
    beside, longest = "original_max_position_embeddings", read.count("max_position_embeddings")
    original = settings.get(beside, read.count(beside, default=settings.get(beside, ...)))

    def of(which: str, most: int) -> RopeScaling:
        keys = [f"{which}_{part}" for part in ("factor", "mscale")]
        read.missing += [f"rope_scaling.{key}" for key in keys if key not in settings]
        divisors, factor = (settings.get(key, default) for key, default in zip(keys, ([], 1.0), strict=True))
        if not isinstance(divisors, list | tuple):
            raise ConfigError(f"config: rope_scaling.{which}_factor must be a list of numbers, got {short(divisors)}")
        numbers = tuple(checked_real(f"rope_scaling.{which}_factor", one, most=1e6) for one in divisors)
        return RopeScaling("longrope", 1.0, original, attention_factor=factor, divisors=numbers, longest=most)

    known = longest > original and "long_factor" in settings
    return replace(of("short", original), beyond=of("long", longest) if known else None)


def reach(rope: RopeSpec | None) -> int:
    """Longest text that an extended context is for, 0 where none is extended so.

    Linear and YaRN settings multiply a context that the config states as it was (Qwen's instructions, and vLLM);
    llama3's are of a config that states the extended one.
    """
    if rope is None or rope.scaling is None or rope.scaling.kind in ("llama3", "longrope"):
        return 0
    return min(int(rope.scaling.original * rope.scaling.factor), POSITIONS)


def limit(rope: RopeSpec | None) -> int:
    """Longest text that a rotation is right for, see ``_long``."""
    return (rope.scaling.chosen.longest if rope and rope.scaling else 0) or POSITIONS


def _attention_factor(settings: Mapping[str, Any]) -> float | None:
    if "attention_factor" in settings:
        return settings["attention_factor"]
    one, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if not one or not all_dim:
        return None
    return yarn_scale(settings, one) / yarn_scale(settings, all_dim)


def yarn_scale(settings: Mapping[str, Any], mscale: float) -> float:
    """``0.1 s ln(factor) + 1`` (YaRN, Peng 2023)."""
    return 0.1 * float(mscale) * math.log(max(float(settings.get("factor") or 1.0), 1.0)) + 1
