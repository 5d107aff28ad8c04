"""Where a family's config keeps some of its numbers, see ``jaxspec.models.family``."""

from dataclasses import dataclass

from jaxspec.models.read import Reader
from jaxspec.nn.hyper import HyperSpec


@dataclass(frozen=True)
class FfnRow:
    """Where a family's config keeps its dense feed-forward numbers; a value that is a string names a config key.

    Attributes:
      hidden: key of F.
      activation: key of the activation's name.
      gated: whether a gate multiplies the hidden units.
      bias: biases of the products.
    """

    hidden: str = "intermediate_size"
    activation: str = "hidden_act"
    gated: bool = True
    bias: bool | str = False


@dataclass(frozen=True)
class HyperRow:
    """Keys of the numbers of hyper-connections."""

    streams: str
    rounds: str
    eps: str

    def spec(self, read: Reader) -> HyperSpec:
        """Reads the numbers."""
        eps = read.real(self.eps, default=1e-6, most=1.0)
        return HyperSpec(read.count(self.streams, default=4), read.count(self.rounds, default=20), eps)
