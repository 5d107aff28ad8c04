"""Attention whose windowed layers have heads of their own, and whose lists say how each layer turns."""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models.mixers.gqa import FULL, NEAR, GqaRow
from jaxspec.models.read import Reader, checked_real, short
from jaxspec.nn.attention import AttentionSpec

# What a windowed layer may have of its own, and every layer, and under which key the plain row reads it.
OWN = {"num_attention_heads", "num_attention_groups", "head_dim"}
TURNS = {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}


@dataclass(frozen=True)
class ByLayerRow:
    """Of Step 3.5: reads each layer as the plain row would read a config that speaks of that layer alone.

    Attributes:
      plain: row of every layer.
    """

    plain: GqaRow

    def spec(self, read: Reader, layer: int) -> AttentionSpec:
        """Attention of one layer.

        Raises:
          ConfigError: a list is too short, or the settings of windowed layers are not known here.
        """
        count = read.count("num_hidden_layers")
        kinds = read.kinds("layer_types", (FULL, NEAR), count) or [FULL] * count
        near = kinds[min(layer, len(kinds) - 1)] == NEAR
        alone = copy(read)
        alone.config = {**read.config, **self._turns(read, layer), **self._own(read, layer, near=near)}
        read.asked.add("rope_scaling")
        if near and NEAR not in (read.kinds("yarn_only_types", (FULL, NEAR), 0) or ()):
            alone.config["rope_scaling"] = None
        spec = self.plain.spec(alone, layer)
        return replace(spec, scale=read.real("query_pre_attn_scalar", default=spec.head_dim) ** -0.5)

    @staticmethod
    def _turns(read: Reader, layer: int) -> dict[str, Any]:
        """Base and turned part of the layer, where they are lists."""
        turns, count = {}, max(read.count("num_hidden_layers"), layer + 1)
        for key, plain in TURNS.items():
            values = read.get(key, default=None)
            if isinstance(values, list):
                if len(values) < count and not read.missing:
                    raise ConfigError(f"config: {key} must be listed for each of {count} layers, got {short(values)}")
                turns[plain] = checked_real(key, values[min(layer, len(values) - 1)])
        return turns

    @staticmethod
    def _own(read: Reader, layer: int, *, near: bool) -> dict[str, Any]:
        """Heads of a windowed layer: as the hub, or as transformers writes them."""
        other = read.mapping("attention_other_setting") if near else {}
        heads = read.get("num_sliding_attention_heads", default=None) if near else None
        listed = read.mapping("per_layer_config").get(str(layer), {})
        if not isinstance(listed, dict) or listed.keys() - OWN:
            raise ConfigError(f"config: per_layer_config may hold {sorted(OWN)} by layer, got {short(listed)}")
        own = {key: other[key] for key in OWN if other.get(key) is not None}
        return own | ({} if heads is None else {"num_attention_heads": heads}) | listed
