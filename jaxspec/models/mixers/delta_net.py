"""Gated delta nets from a published config."""

from dataclasses import dataclass

from jaxspec.errors import ConfigError
from jaxspec.models.read import Reader
from jaxspec.nn.delta_net import DeltaNetSpec


@dataclass(frozen=True)
class DeltaNetRow:
    """Reads Qwen's ``linear_...`` keys.

    Attributes:
      grouped: see ``DeltaNetSpec``.
    """

    grouped: bool = False

    def spec(self, read: Reader, layer: int) -> DeltaNetSpec:
        """Mixer of one layer.

        Raises:
          ConfigError: value heads cannot share the key heads evenly.
        """
        keys, values = read.count("linear_num_key_heads"), read.count("linear_num_value_heads")
        if values % keys and not read.missing:
            raise ConfigError(f"config: {values} value heads cannot share {keys} key heads evenly (linear_num_...)")
        return DeltaNetSpec(
            key_heads=keys,
            value_heads=values,
            key_dim=read.count("linear_key_head_dim"),
            value_dim=read.count("linear_value_head_dim"),
            taps=read.count("linear_conv_kernel_dim"),
            grouped=self.grouped,
        )
