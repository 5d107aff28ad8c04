"""Attention within chunks, and full attention without positions between, from a published config."""

from dataclasses import dataclass, replace

from jaxspec.errors import ConfigError
from jaxspec.models.mixers.gqa import FULL, GqaRow
from jaxspec.models.read import Reader, short
from jaxspec.models.rotary import reach, rope_of
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.temperature import Temperature

CHUNKED = "chunked_attention"


@dataclass(frozen=True)
class ChunkedRow:
    """Of Llama 4: layers that turn see their own chunk, others see all, and their queries grow with the position."""

    def spec(self, read: Reader, layer: int) -> AttentionSpec:
        """Attention of one layer."""
        count, turns = read.count("num_hidden_layers"), self._turns(read, layer)
        kinds = read.kinds("layer_types", (FULL, CHUNKED), count)
        near = turns if kinds is None else kinds[min(layer, count - 1)] == CHUNKED
        normed = read.flag("use_qk_norm", default=True) and turns
        chunk = 0 if read.is_null("attention_chunk_size") else read.count("attention_chunk_size", default=8192)
        bias = "attention_bias"
        plain = GqaRow(qkv_bias=bias, out_bias=bias, windows="never", rope=turns, interleaved=True, norm_turned=True)
        return replace(
            plain.spec(read, layer),
            qk_norm="bare" if normed else "none",
            window=chunk if near and chunk else None,
            chunked=bool(near and chunk),
            temperature=None if turns else self._temperature(read),
        )

    @staticmethod
    def _turns(read: Reader, layer: int) -> bool:
        """Whether queries and keys of a layer are rotated: by a list, or all but the last of so many."""
        count, listed = read.count("num_hidden_layers"), read.get("no_rope_layers", default=None)
        every = read.count("no_rope_layer_interval", default=4)
        if not listed:
            return (layer + 1) % every != 0
        if not isinstance(listed, list) or len(listed) < count or any(one not in (0, 1) for one in listed):
            raise ConfigError(
                f"config: no_rope_layers must say 1 (turns) or 0 for each of the {count} layers, got {short(listed)}"
            )
        return bool(listed[min(layer, count - 1)])

    @staticmethod
    def _temperature(read: Reader) -> Temperature | None:
        tuned = read.get("attn_temperature_tuning", default=True)  # the first release wrote a number
        if not isinstance(tuned, bool | int):
            raise ConfigError(f"config: attn_temperature_tuning must be true or false, got {short(tuned)}")
        scale, step = read.real("attn_scale", default=0.1), read.count("floor_scale", default=8192)
        longest = max(read.count("max_position_embeddings"), reach(rope_of(read, read.count("head_dim", default=128))))
        return Temperature(scale, step, longest) if tuned else None
