"""Where a family's config keeps some of its numbers, see ``jaxspec.models.family``."""

from copy import copy
from dataclasses import dataclass
from typing import Literal

from jaxspec.models.arch import Join, MtpForm
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
      limit: key of the bound of the hidden units.
      late: whether it bounds what the gate's function gives.
    """

    hidden: str = "intermediate_size"
    activation: str = "hidden_act"
    gated: bool = True
    bias: bool | str = False
    limit: str | None = None
    late: bool = False


NORMED = MtpForm()


@dataclass(frozen=True)
class MtpRow:
    """Where a family's config keeps its layers of multi-token prediction, and what kind of layer they are.

    Attributes:
      count: keys of their number, the first present one counts.
      ffn: whether they have experts, or are what a further layer of the model would be.
      like: the kind of layer that they have the attention of.
      most: how many are read; further ones are passed over.
      listed: key of a list of kinds of layers; where it names those of the model alone, none are read.
      form: how they go together.
    """

    count: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    ffn: Literal["next", "dense", "experts"] = "next"
    like: str | None = None
    most: int = 100
    listed: str | None = None
    form: MtpForm = NORMED

    def layers(self, read: Reader, count: int) -> range:
        """Returns the numbers of those that are read, after so many layers of the model."""
        number = min(read.count(*self.count, default=0, least=0), self.most)
        kinds = read.get(self.listed, default=None) if self.listed else None
        return range(count, min(count + number, len(kinds)) if isinstance(kinds, list) else count + number)

    def reader(self, read: Reader, layer: int) -> Reader:
        """Returns a reader of a config whose list of layers' kinds names this one's."""
        if self.like is None:
            return read
        alone = copy(read)
        alone.config = {**read.config, "layer_types": [self.like] * (layer + 1)}
        return alone


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


@dataclass(frozen=True)
class JoinRow:
    """Keys of how a sub-layer's output joins the stream, see ``Join``; a number without keys is 1."""

    scale: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    normed: bool = False
    out_norm: bool = False

    def join(self, read: Reader) -> Join:
        """Reads the numbers."""
        scale, old = (read.real(*keys, default=1.0) if keys else 1.0 for keys in (self.scale, self.old))
        return Join(scale, old, self.normed, self.out_norm)


@dataclass(frozen=True)
class ScaleRow:
    """Keys of what embeddings are multiplied by, logits divided and capped; ``root``: the first by that of D."""

    embed: str = ""
    logits: str = ""
    cap: str = ""
    root: bool | str = False

    def numbers(self, read: Reader, dim: int) -> dict[str, float]:
        """Reads the numbers, by their names in ``ArchSpec``."""
        capped = self.cap and read.get(self.cap, default=None) is not None
        return {
            "embed_scale": dim**0.5
            if read.flag(self.root)
            else read.real(self.embed, default=1.0)
            if self.embed
            else 1.0,
            "logit_scale": 1 / read.real(self.logits, default=1.0) if self.logits else 1.0,
            "logit_cap": read.real(self.cap) if capped else 0.0,
        }
