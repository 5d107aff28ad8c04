"""Grouped-query attention from a published config."""

from dataclasses import dataclass
from typing import Literal

from jaxspec.errors import ConfigError
from jaxspec.models.read import Reader, rope_of
from jaxspec.nn.attention import AttentionSpec


@dataclass(frozen=True)
class GqaRow:
    """What distinguishes the grouped-query attention of one family; a value that is a string names a config key.

    Attributes:
      qkv_bias, out_bias: biases of the projections.
      qk_norm: normalisation of queries and keys.
      qk_norm_switch: config key that must be true for it to apply.
      window_switch: config key that must be true for ``sliding_window`` to apply; None if its presence is enough.
      window_from: config key of the first layer with a window, where ``layer_types`` does not say.
      alternating: layers with even numbers have the window, where ``layer_types`` does not say.
      sinks: whether heads have sinks.
      rope: whether queries and keys are rotated.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_switch: str | None = None
    window_switch: str | None = None
    window_from: str | None = None
    alternating: bool = False
    sinks: bool = False
    rope: bool = True

    def spec(self, read: Reader, layer: int) -> AttentionSpec:
        """Attention of one layer.

        Raises:
          ConfigError: the heads cannot share the key-value heads evenly.
        """
        dim, heads = read.count("hidden_size"), read.count("num_attention_heads")
        kv_heads = read.count("num_key_value_heads", default=heads)
        head_dim = read.count("head_dim", default=dim // heads or 1)
        if heads % kv_heads and not read.missing:
            raise ConfigError(f"config: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
        normed = self.qk_norm_switch is None or read.flag(self.qk_norm_switch)
        return AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope_of(read, head_dim) if self.rope else None,
            qkv_bias=read.flag(self.qkv_bias),
            out_bias=read.flag(self.out_bias),
            qk_norm=self.qk_norm if normed else "none",
            window=self._window(read, layer),
            sinks=self.sinks,
        )

    def _window(self, read: Reader, layer: int) -> int | None:
        window = read.get("sliding_window", default=None)
        if window is None or (self.window_switch and not read.flag(self.window_switch)):
            return None
        kinds = read.get("layer_types", default=None)
        if kinds:
            return window if kinds[min(layer, len(kinds) - 1)] == "sliding_attention" else None
        if self.alternating:
            return window if layer % 2 == 0 else None
        return window if layer >= (read.get(self.window_from, default=0) if self.window_from else 0) else None
