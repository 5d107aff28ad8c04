"""Grouped-query attention from a published config."""

from dataclasses import dataclass
from typing import Literal

from jaxspec.errors import ConfigError
from jaxspec.models.read import Reader
from jaxspec.models.rotary import rope_of
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.rope import RopeSpec

NEAR, FULL = "sliding_attention", "full_attention"


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
      sinks: whether heads have sinks.
      rope: whether queries and keys are rotated, or the key that says ``rope`` where they are.
      norm_offset, gated, norm_turned: see ``AttentionSpec``.
      interleaved: layout of the pairs that turn, see ``RopeSpec``.
      scale: key of the scores' scale.
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
    sinks: bool = False
    rope: bool | str = True
    norm_offset: float = 0.0
    gated: bool = False
    norm_turned: bool = False
    interleaved: bool = False
    scale: str | None = None

    def spec(self, read: Reader, layer: int) -> AttentionSpec:
        """Attention of one layer.

        Raises:
          ConfigError: the heads cannot share the width or the key-value heads evenly.
        """
        dim, heads = read.count("hidden_size"), read.count("num_attention_heads")
        kv_heads = read.count("num_key_value_heads", default=heads)
        if dim % heads and read.config.get("head_dim") is None and "head_dim" not in read.defaults and not read.missing:
            raise ConfigError(f"config: {heads} attention heads cannot share hidden_size {dim} evenly; state head_dim")
        head_dim = read.count("head_dim", default=dim // heads or 1)
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
            sinks=self.sinks,
            norm_offset=self.norm_offset if normed else 0.0,
            gated=self.gated,
            norm_turned=self.norm_turned,
            scale=read.real(self.scale) if self.scale else None,
        )

    def _rope(self, read: Reader, head_dim: int, kind: str) -> RopeSpec | None:
        if not self._rotates(read):
            return None
        return rope_of(read, head_dim, interleaved=self.interleaved, layer_kind=kind)

    def _rotates(self, read: Reader) -> bool:
        if isinstance(self.rope, bool):
            return self.rope
        read.asked |= {"rope_parameters", "rope_scaling", "rope_theta"}
        return read.get(self.rope, default="rope") == "rope"

    def _window(self, read: Reader, layer: int) -> int | None:
        """Positions that a layer sees, None for all."""
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
