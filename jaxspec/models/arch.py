"""An architecture as data: a tuple of layers and a few global numbers."""

from dataclasses import dataclass

from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.moe import FfnSpec, MoeSpec


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: pre-norm attention, then a dense or expert feed-forward."""

    attention: AttentionSpec
    ffn: FfnSpec | MoeSpec


@dataclass(frozen=True)
class ArchSpec:
    """Everything that the shape of the network depends on.

    Attributes:
      family: the ``model_type`` of the published config.
      vocab_size: V.
      model_dim: D.
      layers: one spec per layer.
      norm_eps: of every RMSNorm.
      tied: whether the head reuses the embedding.
      max_position: longest context in tokens.
    """

    family: str
    vocab_size: int
    model_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied: bool
    max_position: int

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts."""
        return any(isinstance(layer.ffn, MoeSpec) for layer in self.layers)
