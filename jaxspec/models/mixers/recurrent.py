"""Delta attention, Mamba-2, lightning attention and short convolutions from a published config."""

from dataclasses import dataclass

from jaxspec.errors import ConfigError
from jaxspec.models.read import Reader, checked_count, checked_real
from jaxspec.nn.kda import KdaSpec
from jaxspec.nn.lightning import LightningSpec
from jaxspec.nn.mamba import MambaSpec
from jaxspec.nn.short_conv import ShortConvSpec


@dataclass(frozen=True)
class KdaRow:
    """Reads ``linear_attn_config``, or the keys of Ling.

    Attributes:
      nested: whether heads, their width and the taps lie under ``linear_attn_config``.
    """

    nested: bool = False

    def spec(self, read: Reader, layer: int) -> KdaSpec:
        """Mixer of one layer."""
        if self.nested:
            inside = read.mapping("linear_attn_config")
            keys = ("num_heads", "head_dim", "short_conv_kernel_size")
            read.missing += [f"linear_attn_config.{key}" for key in keys if key not in inside]
            heads, dim, taps = (checked_count(key, inside.get(key, 1)) for key in keys)
            return KdaSpec(heads, dim, taps, rank=dim)
        heads = read.count("linear_num_heads", "num_attention_heads")
        dim = read.count("linear_head_dim", "head_dim")
        taps = read.count("short_conv_kernel_size", "linear_conv_kernel_dim")
        bounded = read.flag("kda_safe_gate", default=True)
        bound = checked_real("kda_lower_bound", read.get("kda_lower_bound", default=-5.0), above=-1e6, most=0.0)
        return KdaSpec(heads, dim, taps, lower_bound=bound if bounded else None)


@dataclass(frozen=True)
class MambaRow:
    """Keys of Mamba-2's numbers.

    Attributes:
      heads, head_dim, groups, state_dim, taps: see ``MambaSpec``.
      conv_bias, bias: keys of switches.
      grouped_norm: whether each group of heads is normalized by itself.
    """

    heads: str
    head_dim: str
    groups: str
    state_dim: str
    taps: str
    conv_bias: str
    bias: str
    grouped_norm: bool

    def spec(self, read: Reader, layer: int) -> MambaSpec:
        """Mixer of one layer.

        Raises:
          ConfigError: heads cannot lie in equal groups.
        """
        heads, groups = read.count(self.heads), read.count(self.groups)
        if heads % groups and not read.missing:
            raise ConfigError(
                f"config: {heads} heads cannot lie in {groups} equal groups ({self.heads}, {self.groups})"
            )
        return MambaSpec(
            heads=heads,
            head_dim=read.count(self.head_dim),
            groups=groups,
            state_dim=read.count(self.state_dim),
            taps=read.count(self.taps),
            norm_groups=groups if self.grouped_norm else 1,
            conv_bias=read.flag(self.conv_bias, default=True),
            bias=read.flag(self.bias),
        )


@dataclass(frozen=True)
class LightningRow:
    """Reads heads as attention's."""

    def spec(self, read: Reader, layer: int) -> LightningSpec:
        """Mixer of one layer."""
        heads = read.count("num_attention_heads")
        dim = read.count("head_dim", default=max(read.count("hidden_size") // heads, 1))
        return LightningSpec(heads, dim, read.count("num_hidden_layers"))


@dataclass(frozen=True)
class ShortConvRow:
    """Reads LFM2's keys."""

    def spec(self, read: Reader, layer: int) -> ShortConvSpec:
        """Mixer of one layer."""
        return ShortConvSpec(read.count("hidden_size"), read.count("conv_L_cache"), read.flag("conv_bias"))
