"""Grouped-query attention from a published config."""

from dataclasses import dataclass
from typing import Any, Literal

from jaxspec.errors import ConfigError
from jaxspec.models.read import Reader, short
from jaxspec.models.rotary import rope_of
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.rope import RopeSpec

NEAR, FULL = "sliding_attention", "full_attention"
GATES: dict[Any, Literal["head", "channel"]] = {True: "head", "per-head": "head", "per-element": "channel"}


@dataclass(frozen=True)
class GqaRow:
    """What distinguishes the grouped-query attention of one family; a value that is a string names a config key.

    Attributes:
      qkv_bias, out_bias: biases of the projections.
      qk_norm: normalization of queries and keys.
      qk_norm_switch: config key that must be true for it to apply.
      windows: which layers have the window, where ``layer_types`` does not say; in a family of ``none`` only that list
        can give one, and in one of ``never`` nothing.
      window_switch: config key that must be true for ``sliding_window`` to apply; None if its presence is enough.
      window_from: config key of the first layer with a window.
      window_until: config key of the first layer that has none again.
      alternating: layers with even numbers have the window.
      sinks: whether heads have sinks, or the key of whether.
      rope: whether queries and keys are rotated, or the key that says ``rope`` where they are.
      norm_offset, gated, norm_turned: see ``AttentionSpec``.
      interleaved: layout of the pairs that turn, see ``RopeSpec``.
      scale: key of the scores' scale.
      heads, kv_heads, head_dim: keys of H, G and C, of several the first present one counts; H may be a list.
      kv_twice: whether there are twice as many as ``num_key_value_heads`` says, where no key of ``kv_heads`` is there.
      value_dim: keys of the width of a value head, none where it is C.
      value_scale: key of what multiplies the values.
      theta: key of the base of the frequencies, where the rotary settings have none.
      reach: key of how many positions before its own a query sees; without it ``sliding_window`` counts.
      gate: key of how the heads' outputs are gated.
      gate_function: see ``AttentionSpec``.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_switch: str | None = None
    windows: Literal["all", "none", "never"] = "all"
    window_switch: str | None = None
    window_from: str | None = None
    window_until: str | None = None
    alternating: bool = False
    sinks: bool | str = False
    rope: bool | str = True
    norm_offset: float = 0.0
    gated: bool = False
    norm_turned: bool = False
    interleaved: bool = False
    scale: str | None = None
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    kv_twice: bool = False
    head_dim: tuple[str, ...] = ("head_dim",)
    value_dim: tuple[str, ...] = ()
    value_scale: str | None = None
    theta: str = "rope_theta"
    reach: str | None = None
    gate: str | None = None
    gate_function: Literal["softplus", "sigmoid"] = "softplus"

    def spec(self, read: Reader, layer: int) -> AttentionSpec:
        """Attention of one layer.

        Raises:
          ConfigError: the heads cannot share the width or the key-value heads evenly.
        """
        dim, heads = read.count("hidden_size"), read.count_at(layer, *self.heads)
        kv_heads = self._kv_heads(read, heads)
        if read.get(*self.head_dim, default=None) is None and dim % heads and not read.missing:
            raise ConfigError(f"config: {heads} attention heads cannot share hidden_size {dim} evenly; state head_dim")
        head_dim = read.count(*self.head_dim, default=dim // heads or 1)
        if heads % kv_heads and not read.missing:
            raise ConfigError(f"config: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
        normed = self.qk_norm_switch is None or read.flag(self.qk_norm_switch)
        window = None if self.windows == "never" else self._window(read, layer)
        return AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=self._rope(read, head_dim, NEAR if window else FULL),
            qkv_bias=read.flag(self.qkv_bias),
            out_bias=read.flag(self.out_bias),
            qk_norm=self.qk_norm if normed else "none",
            window=window,
            sinks=read.flag(self.sinks),
            norm_offset=self.norm_offset if normed else 0.0,
            gated=self.gated,
            norm_turned=self.norm_turned,
            scale=read.real(self.scale) if self.scale else None,
            value_dim=read.count(*self.value_dim) if self.value_dim else None,
            value_scale=self._value_scale(read),
            outer_gate=self._gate(read),
            gate_function=self.gate_function,
        )

    def _kv_heads(self, read: Reader, heads: int) -> int:
        default = 2 * read.count("num_key_value_heads", default=heads) if self.kv_twice else heads
        return read.count(*self.kv_heads, default=default)

    def _value_scale(self, read: Reader) -> float:
        if self.value_scale is None:
            return 1.0
        scale = read.real(self.value_scale, default=1.0)
        return 1.0 if read.is_null(self.value_scale) else scale

    def _gate(self, read: Reader) -> Literal["none", "head", "channel"]:
        if self.gate is None:
            return "none"
        kind = read.get(self.gate)
        if kind is not True and (not isinstance(kind, str) or kind not in GATES):
            raise ConfigError(f"config: {self.gate} must be true, per-head or per-element, got {short(kind)}")
        return GATES[kind]

    def _rope(self, read: Reader, head_dim: int, kind: str) -> RopeSpec | None:
        if not self._rotates(read):
            return None
        return rope_of(read, head_dim, interleaved=self.interleaved, layer_kind=kind, theta=self.theta)

    def _rotates(self, read: Reader) -> bool:
        if isinstance(self.rope, bool):
            return self.rope
        read.asked |= {"rope_parameters", "rope_scaling", "rope_theta"}
        return read.get(self.rope, default="rope") == "rope"

    def _window(self, read: Reader, layer: int) -> int | None:
        """Positions that a layer sees, None for all."""
        if self.reach is not None and read.get(self.reach, default=None) is not None:
            read.asked.add("sliding_window")
            return read.count(self.reach) + 1
        count = read.count("num_hidden_layers")
        kinds = read.kinds("layer_types", (FULL, NEAR), count)
        if kinds is None and self.windows == "none":
            return None
        off = self.window_switch is not None and not read.flag(self.window_switch)
        stated = None if read.is_null("sliding_window") else read.get("sliding_window", default=None)
        if off or (kinds is not None and NEAR not in kinds):
            return None
        if stated is None:
            if kinds is not None and not read.is_null("sliding_window"):
                read.missing.append("sliding_window")
            return None
        window = read.count("sliding_window")
        if kinds is not None:
            return window if kinds[min(layer, len(kinds) - 1)] == NEAR else None
        first = read.count(self.window_from, default=0, least=0) if self.window_from else 0
        stop = read.count(self.window_until, default=count, least=0) if self.window_until else layer + 1
        return window if first <= layer < stop and not (self.alternating and layer % 2) else None
