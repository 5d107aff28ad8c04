"""Attention with a window and full attention by turns, whose heads have other sizes, from a published config."""

from dataclasses import dataclass

from jaxspec.errors import ConfigError
from jaxspec.models.mixers.gqa import FULL, NEAR
from jaxspec.models.read import Reader, checked_count, short
from jaxspec.models.rotary import rope_of
from jaxspec.nn.attention import AttentionSpec

SIZES = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True)
class TwoSizesRow:
    """Of Gemma 4: full layers have heads of their own, and may take their keys for values."""

    def spec(self, read: Reader, layer: int) -> AttentionSpec:
        """Attention of one layer.

        Raises:
          ConfigError: the heads cannot share the key-value heads evenly, or inputs per layer are asked for.
        """
        if read.get("hidden_size_per_layer_input", default=256):
            raise ConfigError(
                "config: hidden_size_per_layer_input must be 0, got "
                f"{short(read.config.get('hidden_size_per_layer_input', 'nothing, which means 256'))}: models with "
                "embeddings of their own in every layer (Gemma 4 E2B, E4B) are not known here; use 26B-A4B or 31B"
            )
        read.asked |= {"vocab_size_per_layer_input", "global_head_dim", "num_global_key_value_heads"}
        full = self._kind(read, layer) == FULL
        shared = read.flag("attention_k_eq_v")
        heads, (head_dim, kv_heads) = read.count("num_attention_heads"), self._sizes(read, layer, full=full)
        if heads % kv_heads and not read.missing:
            raise ConfigError(f"config: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
        return AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope_of(read, head_dim, layer_kind=FULL if full else NEAR),
            qkv_bias=read.flag("attention_bias"),
            out_bias=read.flag("attention_bias"),
            qk_norm="head",
            window=None if full else read.count("sliding_window", default=512),
            shared_values=shared and full,
            value_norm=True,
            scale=1.0,
        )

    @staticmethod
    def _kind(read: Reader, layer: int) -> str:
        """The list's, or every sixth is full; the last one is in any case, as transformers has it."""
        count = read.count("num_hidden_layers")
        kinds = read.kinds("layer_types", (FULL, NEAR), count)
        if layer >= count - 1:
            return FULL
        return (NEAR if (layer + 1) % 6 else FULL) if kinds is None else kinds[layer]

    @staticmethod
    def _sizes(read: Reader, layer: int, *, full: bool) -> tuple[int, int]:
        """Channels of a head, and key-value heads: by keys for full layers, or as transformers lists them by layer."""
        plain = read.count("head_dim", default=256), read.count("num_key_value_heads", default=4)
        listed = read.mapping("per_layer_config")
        if not listed:
            more = read.get("num_global_key_value_heads", default=None) if read.flag("attention_k_eq_v") else None
            own = plain[1] if more is None else read.count("num_global_key_value_heads")
            return (read.count("global_head_dim", default=512), own) if full else plain
        own = listed.get(str(layer), {})
        if not isinstance(own, dict) or own.keys() - set(SIZES):
            raise ConfigError(f"config: per_layer_config may hold {' and '.join(SIZES)} by layer, got {short(own)}")
        both = zip(SIZES, plain, strict=True)
        dim, heads = (checked_count(f"per_layer_config.{key}", own.get(key, size)) for key, size in both)
        return dim, heads
