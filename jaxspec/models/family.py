"""A model family as a row of data, and the one reader that turns a published config into an ArchSpec."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.ffn import ACTIVATIONS
from jaxspec.nn.moe import FfnSpec, MoeSpec
from jaxspec.nn.rope import RopeScaling, RopeSpec
from jaxspec.nn.router import RouterSpec

Config = Mapping[str, Any]


@dataclass(frozen=True)
class MoeRow:
    """Where a family's config keeps its expert numbers; a value that is a string names a config key.

    Attributes:
      experts, top_k, hidden: keys of E, A and F, the first present one counts.
      router: kind of router.
      renormalise: whether chosen probabilities are renormalised.
      shared_hidden: key of the shared expert's F, None for no shared expert.
      shared_gate: whether the shared expert is gated.
      sparse_step: whether ``decoder_sparse_step`` and ``mlp_only_layers`` leave some layers dense.
    """

    experts: tuple[str, ...]
    top_k: str
    hidden: str
    router: Literal["softmax", "topk_softmax"] = "softmax"
    renormalise: bool | str = True
    shared_hidden: str | None = None
    shared_gate: bool = False
    sparse_step: bool = False


@dataclass(frozen=True)
class Family:
    """What distinguishes one ``model_type`` from another; a value that is a string names a config key.

    Attributes:
      model_type: of the published config.
      qkv_bias, out_bias: biases of the attention projections.
      qk_norm: normalisation of queries and keys.
      window_switch: config key that must be true for ``sliding_window`` to apply; None if its presence is enough.
      moe: expert row, None for a dense family.
      defaults: config values that may be left out.
    """

    model_type: str
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    qk_norm: Literal["none", "head"] = "none"
    window_switch: str | None = None
    moe: MoeRow | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


class _Reader:
    """Reads keys with defaults and remembers every missing one, so that all are reported at once."""

    def __init__(self, config: Config, defaults: Mapping[str, Any]):
        self.config, self.defaults, self.missing = config, defaults, []

    def get(self, *keys: str, default: Any = ...) -> Any:
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
        value = self.get(*keys, default=default)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"config: {keys[0]} must be a whole number of at least 1, got {value!r}")
        return value

    def flag(self, value: bool | str) -> bool:
        return bool(self.get(value, default=False)) if isinstance(value, str) else value


def arch_from_config(config: Config, family: Family) -> ArchSpec:
    """Builds the architecture from a published ``config.json``.

    Raises:
      ConfigError: keys are missing (all listed) or values contradict each other.
    """
    read = _Reader(config, family.defaults)
    dim, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads = read.count("num_key_value_heads", default=heads)
    head_dim = read.count("head_dim", default=dim // heads or 1)
    window = read.get("sliding_window", default=None)
    if family.window_switch and not read.flag(family.window_switch):
        window = None
    attention = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope_from_config(read, head_dim),
        qkv_bias=read.flag(family.qkv_bias),
        out_bias=read.flag(family.out_bias),
        qk_norm=family.qk_norm,
        window=window,
    )
    ffns = [_ffn(read, family, layer) for layer in range(read.count("num_hidden_layers"))]
    spec = ArchSpec(
        family=family.model_type,
        vocab_size=read.count("vocab_size"),
        model_dim=dim,
        layers=tuple(LayerSpec(attention, ffn) for ffn in ffns),
        norm_eps=float(read.get("rms_norm_eps", default=1e-6)),
        tied=bool(read.get("tie_word_embeddings", default=False)),
        max_position=read.count("max_position_embeddings"),
    )
    if read.missing:
        raise ConfigError(f"config of {family.model_type}: missing {sorted(set(read.missing))}")
    if heads % kv_heads:
        raise ConfigError(f"config: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    return spec


def _ffn(read: _Reader, family: Family, layer: int) -> FfnSpec | MoeSpec:
    activation = read.get("hidden_act", default="silu")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"config: hidden_act {activation!r} is not known; known are {sorted(ACTIVATIONS)}")
    row = family.moe
    if row is None or (row.sparse_step and not _is_sparse(read, layer)):
        return FfnSpec(read.count("intermediate_size"), activation)
    experts, top_k = read.count(*row.experts), read.count(row.top_k)
    if top_k > experts and not read.missing:
        raise ConfigError(f"config: {row.top_k} is {top_k}, but there are only {experts} experts")
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        hidden=read.count(row.hidden),
        router=RouterSpec(row.router, read.flag(row.renormalise)),
        shared_hidden=read.count(row.shared_hidden) if row.shared_hidden else 0,
        shared_gate=row.shared_gate,
        activation=activation,
    )


def _is_sparse(read: _Reader, layer: int) -> bool:
    step = read.get("decoder_sparse_step", default=1)
    return layer not in read.get("mlp_only_layers", default=[]) and (layer + 1) % step == 0


def rope_from_config(read: _Reader, head_dim: int) -> RopeSpec:
    """Rotation from either dialect: hub ``rope_theta`` + ``rope_scaling``, or transformers 5 ``rope_parameters``."""
    nested = read.get("rope_parameters", default=None) or {}
    scaling = read.get("rope_scaling", default=None) or {}
    if not isinstance(scaling, Mapping) or not isinstance(nested, Mapping):
        raise ConfigError(f"config: rope_scaling must be an object, got {scaling or nested!r}")
    scaling = {**scaling, **nested}
    theta = float(nested.get("rope_theta") or read.get("rope_theta", default=10000.0))
    dim = int(head_dim * float(scaling.get("partial_rotary_factor") or 1.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta, dim)
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"config: rope scaling {kind!r} is not known; known are default, linear, llama3, yarn")
    original = scaling.get("original_max_position_embeddings") or read.count("max_position_embeddings")
    if scaling.get("factor") is None:
        read.missing.append("rope_scaling.factor")
    names = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    low, high = (scaling.get(name) for name in names)
    return RopeSpec(
        theta,
        dim,
        scaling=RopeScaling(
            kind=kind,
            factor=float(scaling.get("factor") or 1.0),
            original=int(original),
            low=float(low if low is not None else 1.0),
            high=float(high if high is not None else (4.0 if kind == "llama3" else 32.0)),
            attention_factor=scaling.get("attention_factor"),
            truncate=bool(scaling.get("truncate", True)),
        ),
    )
