"""An architecture as data: a tuple of layers and a few global numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from jaxspec.cache.addressing import StreamSpec
from jaxspec.nn.ffn import FfnSpec
from jaxspec.nn.hyper import HyperSpec
from jaxspec.nn.moe import MoeSpec


class MixerSpec(Protocol):
    """What mixes positions: one kind of attention, or of recurrence; ``jaxspec.models.block.MIXERS`` lists them."""

    @property
    def streams(self) -> Mapping[str, StreamSpec]:
        """Returns what it caches, by name."""
        ...

    @property
    def chain_only(self) -> str | None:
        """Returns why trees cannot be verified, None if they can."""
        ...

    @property
    def one_text_only(self) -> bool:
        """Whether a row without a cache can hold one text alone: what selects positions knows no others."""
        ...


@dataclass(frozen=True)
class NoMixer:
    """In place of attention in a layer that has none."""

    chain_only = None
    one_text_only = False

    @property
    def streams(self) -> Mapping[str, StreamSpec]:
        """Returns nothing."""
        return {}


@dataclass(frozen=True)
class Join:
    """How the output of a sub-layer joins the stream: ``old stream + scale out``.

    Attributes:
      scale: of the output.
      old: of what it is added to.
      normed: whether that is what the sub-layer read, the normalized stream.
      out_norm: whether the output is normalized before.
    """

    scale: float = 1.0
    old: float = 1.0
    normed: bool = False
    out_norm: bool = False


@dataclass(frozen=True)
class MtpForm:
    """How layers of multi-token prediction go together.

    Attributes:
      stream: whether what they join is the stream, before the last norm: the model's, and what they return themselves.
      chained: whether a later layer joins what the one before returned, and not what the model did.
      own_heads: whether each has a head of its own.
    """

    stream: bool = False
    chained: bool = True
    own_heads: bool = False


SUM = Join()
SECOND = "second_"


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: attention or a recurrence, then a dense or expert feed-forward; one of both may be missing.

    Attributes:
      attention: mixes positions; ``NoMixer`` for none.
      ffn: None for none.
      joins: how each joins the stream.
      scaled: whether a learned number multiplies the stream after it.
      second: a further attention and dense feed-forward of the same layer, after which alone what the routed experts of
        the first half give is added (ScMoE, Cai 2024, arXiv 2404.05019).
    """

    attention: MixerSpec
    ffn: FfnSpec | MoeSpec | None
    joins: tuple[Join, Join] = (SUM, SUM)
    scaled: bool = False
    second: "LayerSpec | None" = None

    @property
    def halves(self) -> "tuple[LayerSpec, ...]":
        """Returns the layer and what follows in it."""
        return (self,) if self.second is None else (self, self.second)

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """Returns what it caches, by name; those of the second half as ``SECOND`` names them."""
        second = {} if self.second is None else self.second.attention.streams
        return {**self.attention.streams, **{SECOND + name: stream for name, stream in second.items()}}


@dataclass(frozen=True)
class ArchSpec:
    """Everything that the shape of the network depends on.

    Attributes:
      family: the ``model_type`` of the published config.
      vocab_size: V.
      model_dim: D.
      layers: one spec per layer.
      norm: root mean square, or mean and variance with a bias.
      norm_eps: of every norm whose family does not fix its own.
      norm_offset: added to every scale of a norm of the stream, see ``rms_norm``.
      norm_last: whether a layer normalizes what it adds to instead of what it reads (OPT-350m).
      final_norm: whether the last stream is normalized.
      tied: whether the head reuses the embedding.
      max_position: longest context in tokens.
      learned_positions: rows of a table of positions, 0 for none; position i is row i + 2 (OPT).
      embed_dim: width of the embedding where projections lead from and to it, 0 where it is D.
      hyper: hyper-connections between layers, None for plain residuals.
      mtp: layers of multi-token prediction after the model.
      mtp_form: how they go together.
      embed_scale, logit_scale: of embeddings and logits.
      head_bias: whether the head has one.
      logit_cap: c where logits x are ``c tanh(x / c)``, 0 where they are not capped.
    """

    family: str
    vocab_size: int
    model_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied: bool
    max_position: int
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_last: bool = False
    final_norm: bool = True
    learned_positions: int = 0
    embed_dim: int = 0
    hyper: HyperSpec | None = None
    mtp: tuple[LayerSpec, ...] = ()
    mtp_form: MtpForm = MtpForm()
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    head_bias: bool = False
    logit_cap: float = 0.0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with routed experts."""
        return tuple(y for y, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts."""
        return bool(self.expert_layers)

    @property
    def one_text_only(self) -> bool:
        """Whether a row without a cache can hold one text alone."""
        return any(layer.attention.one_text_only for layer in self.layers)

    @property
    def chain_only(self) -> str | None:
        """Returns why trees cannot be verified, None if they can."""
        return next((why for layer in self.layers if (why := layer.attention.chain_only)), None)


@dataclass(frozen=True)
class Segment:
    """Layers that repeat: ``pattern`` from layer ``first`` on, ``repeats`` times."""

    first: int
    pattern: tuple[LayerSpec, ...]
    repeats: int

    @property
    def stop(self) -> int:
        """Number of the first layer after it."""
        return self.first + len(self.pattern) * self.repeats


LONGEST_PATTERN = 10


def segments(layers: tuple[LayerSpec, ...]) -> Iterator[Segment]:
    """Cuts a model's layers into repeating patterns; what does not repeat is a segment of one layer."""
    first = 0
    while first < len(layers):
        longest = Segment(first, layers[first : first + 1], 1)
        for period in range(1, LONGEST_PATTERN + 1):
            pattern = layers[first : first + period]
            repeats = 1
            while layers[first + repeats * period : first + (repeats + 1) * period] == pattern:
                repeats += 1
            if repeats > 1 and repeats * period > longest.stop - first:
                longest = Segment(first, pattern, repeats)
        yield longest
        first = longest.stop


def experts_of(arch: ArchSpec) -> int:
    """Returns E, the most routed experts that a layer of the model has."""
    return max((layer.ffn.experts for layer in arch.layers if isinstance(layer.ffn, MoeSpec)), default=0)


def expert_dtype(arch: ArchSpec) -> np.dtype:
    """Returns the smallest dtype that holds the number of whatever a router may choose."""
    most = max((layer.ffn.choices for layer in arch.layers if isinstance(layer.ffn, MoeSpec)), default=0)
    return np.dtype(np.uint8 if most <= 1 << 8 else np.uint16)


def chosen_of(arch: ArchSpec) -> int:
    """Returns A, the most experts that a layer of the model chooses for a token."""
    return max((layer.ffn.top_k for layer in arch.layers if isinstance(layer.ffn, MoeSpec)), default=0)
