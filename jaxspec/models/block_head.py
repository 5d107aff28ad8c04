"""Heads that draft a whole block in one pass, from what the target knew before it: DFlash, DFlash2 and DSpark."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.block import NORMS
from jaxspec.models.block_refine import Confidence, Markov, MarkovKind, Selector
from jaxspec.models.draft_head import EMBED, FC, FEATURE_NORM, HEAD, choices
from jaxspec.nn.anchored import Anchored, BlockView
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.block_attention import BlockAttention
from jaxspec.nn.block_conv import BlockConv
from jaxspec.nn.block_one_key import BlockOneKey
from jaxspec.nn.compressed_attention import CompressedSpec
from jaxspec.nn.dense import dense, lookup
from jaxspec.nn.ffn import DenseFfn
from jaxspec.nn.hyper import HyperConnection, HyperHead, merge
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.moe import Moe, MoeSpec
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.router import Routing
from jaxspec.protocol import NO_CAPTURE, CaptureSpec, Features
from jaxspec.pytree import replace
from jaxspec.shapes import Array, Params

MIXERS: dict[type, Any] = {AttentionSpec: BlockAttention, CompressedSpec: BlockOneKey}
MASK = Param("mask_D", ("embed",), "weight")


@dataclass(frozen=True)
class BlockSpec:
    """A head that drafts a block of tokens at once.

    Its keys and values of earlier positions are projections of the target's residual streams there. Row 0 of the block
    is the anchor, the others are masks. By default row k predicts the token of its own position (DFlash, z-lab 2026);
    where the anchor predicts too, row k predicts the token after it (DSpark, DeepSeek 2026).

    Attributes:
      arch: its network: width, layers and norms; the vocabulary is the target's.
      target_dim: width of each vector that it reads.
      reads: layer boundaries.
      block_size: rows of a block.
      mask_token: token whose embedding stands for what is not drafted yet.
      from_anchor: whether the anchor's row predicts the first draft.
      causal: per layer, whether rows see only those before them in the block.
      window_from_anchor: whether windows end at the anchor for all rows of a block.
      draft_vocab: W, tokens that its own head knows; 0 where it uses the target's head.
      own_embedding, own_mask: whether it has an embedding, or just that of the mask, of its own.
      embedding_scale, output_scale: multiply embeddings and logits.
      softcap: bound of the logits, 0 for none.
      conv_taps, conv_group: rows and channels of DFlash2's convolution, 0 for none.
      selector_rank, selector_top_k: of DFlash2's choice among the best candidates of each row, 0 for none.
      markov_rank, markov_kind: of DSpark's bias from the token before, 0 for none.
      confidence: what a predictor of acceptance reads besides the hidden state.
      confidence_bias: whether it has a bias.
    """

    arch: ArchSpec
    target_dim: int
    reads: CaptureSpec = NO_CAPTURE
    block_size: int = 8
    mask_token: int = 0
    from_anchor: bool = False
    causal: tuple[bool, ...] = ()
    window_from_anchor: bool = False
    draft_vocab: int = 0
    own_embedding: bool = False
    own_mask: bool = False
    embedding_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0
    conv_taps: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    markov_kind: MarkovKind = "vanilla"
    confidence: Literal["none", "hidden", "markov"] = "none"
    confidence_bias: bool = True

    @property
    def drafts(self) -> int:
        """K, the drafts of a block."""
        return self.block_size - (not self.from_anchor)

    @property
    def first(self) -> int:
        """Row of the first draft."""
        return self.block_size - self.drafts

    @property
    def parts(self) -> int:
        """Number of the target's vectors that it reads."""
        return len(self.reads.taps)

    @property
    def width(self) -> int:
        """Tokens that it drafts."""
        return self.draft_vocab or self.arch.vocab_size

    @property
    def follows(self) -> bool:
        """Whether a draft depends on the one before it, or comes with a confidence."""
        return bool(self.selector_rank or self.markov_rank or self.confidence != "none")

    @property
    def normed_late(self) -> bool:
        """Whether a call returns the hidden state before the last norm, as DeepSeek-V4's confidence reads it."""
        return self.arch.hyper is not None

    @cached_property
    def views(self) -> tuple[BlockView, ...]:
        """Returns what rows of a block see in each layer."""
        causal = self.causal or (False,) * len(self.arch.layers)
        return tuple(
            BlockView(getattr(layer.attention, "window", None), only, self.window_from_anchor)
            for layer, only in zip(self.arch.layers, causal, strict=True)
        )

    def feature(self, features: Features) -> Array:
        """Concatenates what it reads, [B, T, X]."""
        return jnp.concatenate(features.taps, axis=-1)

    def shaped(self, logits: Array) -> Array:
        """Scales and bounds the logits of its vocabulary product."""
        logits = logits * self.output_scale if self.output_scale != 1 else logits
        return self.softcap * jnp.tanh(logits / self.softcap) if self.softcap else logits


class BlockLayer(nn.Module):
    """One layer over the rows of blocks."""

    layer: LayerSpec
    view: BlockView
    spec: BlockSpec
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        s, p, a = self.spec, self.policy, self.spec.arch
        ffn = self.layer.ffn
        assert ffn is not None, "layers of heads have both parts"
        self.attention_norm_D = declare(self, p, NORMS["attention_norm"], (a.model_dim,))
        mixer = MIXERS[type(self.layer.attention)]
        self.attention = mixer(self.layer.attention, self.view, a.model_dim, a.norm_eps, p)
        self.ffn_norm_D = declare(self, p, NORMS["ffn_norm"], (a.model_dim,))
        self.ffn = Moe(ffn, a.model_dim, p) if isinstance(ffn, MoeSpec) else DenseFfn(ffn, a.model_dim, p)
        if a.hyper is not None:
            self.attention_hyper, self.ffn_hyper = (
                HyperConnection(a.hyper, a.model_dim, a.norm_eps, p) for _ in range(2)
            )
        if s.conv_taps:
            conv = s.conv_taps, s.conv_group, s.block_size, a.model_dim, p
            self.attention_conv, self.ffn_conv = BlockConv(*conv), BlockConv(*conv)

    def observe(self, c_BTD: Array, inputs: Inputs) -> Any:
        """Returns the memory with what the target's features show at T positions."""
        return self.attention.observe(c_BTD, inputs)

    def __call__(self, x_BTD: Array, inputs: Inputs) -> tuple[Array, Any, Routing | None]:
        """Returns the stream or streams after the layer, its memory, and expert choices."""
        eps = self.spec.arch.norm_eps
        if self.spec.arch.hyper is not None:
            return self._over_streams(x_BTD, inputs)
        u = rms_norm(x_BTD, self.attention_norm_D, eps)
        if self.spec.conv_taps:
            u, *own = self.attention_conv(u)
            out, memory = self.attention(u, inputs)
            x_BTD = x_BTD + self.attention_conv.convolve(out, *own)
            u, *own = self.ffn_conv(rms_norm(x_BTD, self.ffn_norm_D, eps))
            out, routing = self._feed_forward(u, inputs)
            return x_BTD + self.ffn_conv.convolve(out, *own), memory, routing
        out, memory = self.attention(u, inputs)
        x_BTD = x_BTD + out
        out, routing = self._feed_forward(rms_norm(x_BTD, self.ffn_norm_D, eps), inputs)
        return x_BTD + out, memory, routing

    def _over_streams(self, x_BTND: Array, inputs: Inputs) -> tuple[Array, Any, Routing | None]:
        eps = self.spec.arch.norm_eps
        u, *back = self.attention_hyper(x_BTND)
        out, memory = self.attention(rms_norm(u, self.attention_norm_D, eps), inputs)
        x_BTND = merge(x_BTND, out, *back)
        u, *back = self.ffn_hyper(x_BTND)
        out, routing = self._feed_forward(rms_norm(u, self.ffn_norm_D, eps), inputs)
        return merge(x_BTND, out, *back), memory, routing

    def _feed_forward(self, u_BTD: Array, inputs: Inputs) -> tuple[Array, Routing | None]:
        return self.ffn(u_BTD, inputs) if isinstance(self.ffn, Moe) else (self.ffn(u_BTD), None)


class BlockHead(nn.Module):
    """Parameters of a head that drafts blocks.

    Attributes:
      spec: what it is.
      policy: how parameters are kept.
    """

    spec: BlockSpec
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        s, p, a = self.spec, self.policy, self.spec.arch
        if s.own_embedding:
            self.embed_VD = declare(self, p, EMBED, (a.vocab_size, a.model_dim))
        if s.own_mask:
            self.mask_D = declare(self, p, MASK, (a.model_dim,))
        self.fc_XD = declare(self, p, FC, (s.parts * s.target_dim, a.model_dim))
        self.feature_norm_D = declare(self, p, FEATURE_NORM, (a.model_dim,))
        self.layers = [BlockLayer(layer, view, s, p) for layer, view in zip(a.layers, s.views, strict=True)]
        self.norm_D = declare(self, p, NORMS["norm"], (a.model_dim,))
        if a.hyper is not None:
            self.hyper_head = HyperHead(a.hyper, a.model_dim, a.norm_eps, p)
        if s.draft_vocab:
            self.head_DW = declare(self, p, HEAD, (a.model_dim, s.draft_vocab))
        if s.markov_rank:
            self.markov = Markov(s.markov_kind, s.markov_rank, a.vocab_size, s.width, a.model_dim, p)
        if s.confidence != "none":
            read = a.model_dim + (s.markov_rank if s.confidence == "markov" else 0)
            self.acceptance = Confidence(read, s.confidence_bias, p)
        if s.selector_rank:
            self.selector = Selector(s.selector_rank, a.vocab_size, a.model_dim, p)

    def join(self, feature_BTX: Array) -> Array:
        """Maps the target's streams to what every layer's keys and values are projected from, [B, T, D]."""
        c_BTD = dense(feature_BTX, self.fc_XD, dtype=self.policy.compute.dtype)
        return rms_norm(c_BTD, self.feature_norm_D, self.spec.arch.norm_eps)

    def observe(self, c_BTD: Array, inputs: Inputs) -> tuple[Any, ...]:
        """Returns the memory of all layers with T positions of ``join`` in it."""
        each = zip(self.layers, self._layer_inputs(inputs), strict=True)
        return tuple(layer.observe(c_BTD, inputs) for layer, inputs in each)

    def _layer_inputs(self, inputs: Inputs) -> list[Inputs]:
        """Returns what each layer reads, whose caches are written as the kernels' machine wants it."""
        inputs = inputs.written_by(self.policy.compute)
        return [replace(inputs, memory=memory) for memory in inputs.memory]

    def embed(self, token: Array) -> Array:
        """Its own embeddings, float32 [..., D]."""
        return lookup(self.embed_VD, token)

    def __call__(self, embedded_BTD: Array, inputs: Inputs) -> tuple[Array, tuple[Any, ...]]:
        """Runs whole blocks, one or several in a row.

        Args:
          embedded_BTD: embeddings of anchors and masks.
          inputs: their positions, and the memory of each layer.

        Returns:
          What ``normed`` makes the vocabulary product's input, and the memory.
        """
        return self.routed(embedded_BTD, inputs)[:2]

    def routed(self, embedded_BTD: Array, inputs: Inputs) -> tuple[Array, tuple[Any, ...], tuple[Routing, ...]]:
        """As a call, which also returns the choices of its own experts, of each layer that has some."""
        s, x = self.spec, embedded_BTD
        if s.own_mask:
            is_mask_T = jnp.arange(x.shape[1], dtype=jnp.int32) % s.block_size > 0
            x = jnp.where(is_mask_T[:, None], self.mask_D.astype(jnp.float32), x)
        x = x * s.embedding_scale if s.embedding_scale != 1 else x
        if s.arch.hyper is not None:
            x = jnp.repeat(x[:, :, None], s.arch.hyper.streams, axis=2)
        written, chosen = [], []
        for layer, own in zip(self.layers, self._layer_inputs(inputs), strict=True):
            x, memory, routing = layer(x, own)
            written.append(memory)
            chosen.append(routing)
        last = self.hyper_head(x) if s.normed_late else rms_norm(x, self.norm_D, s.arch.norm_eps)
        return last, tuple(written), choices(chosen)

    def normed(self, last: Array) -> Array:
        """Returns what the vocabulary product reads of what a call returned."""
        return rms_norm(last, self.norm_D, self.spec.arch.norm_eps) if self.spec.normed_late else last

    def logits(self, last: Array) -> Array:
        """Its own head over what it reads, float32 [..., W]; ``BlockSpec.shaped`` is left to the caller."""
        return dense(last, self.head_DW, dtype=self.policy.compute.dtype)

    def markov_embed(self, token: Array) -> Array:
        """See ``Markov.embed``."""
        return self.markov.embed(token)

    def markov_advance(self, e: Array, last: Array, state: Array) -> tuple[Array, Array]:
        """See ``Markov.advance``."""
        return self.markov.advance(e, last, state)

    def markov_bias(self, z: Array) -> Array:
        """See ``Markov.bias``."""
        return self.markov.bias(z)

    def confidence(self, last: Array, e: Array | None) -> Array:
        """Returns the logit of a draft's being accepted; ``e`` is the ``markov_embed`` of the token before it."""
        read = last if self.spec.confidence == "hidden" or e is None else jnp.concatenate([last, e], axis=-1)
        return self.acceptance(read)

    def context(self, token: Array, last: Array) -> Array:
        """See ``Selector.context``."""
        return self.selector.context(token, last)

    def candidate_scores(self, context: Array, candidate: Array) -> Array:
        """See ``Selector.scores``."""
        return self.selector.scores(context, candidate)

    def everything(self) -> None:
        """Runs all parts once, which declares all parameters."""
        s, token = self.spec, jnp.zeros((1, 1), jnp.int32)
        c = self.join(jnp.zeros((1, 1, s.parts * s.target_dim)))
        text = (Anchored(token, token, size=s.block_size),) * len(self.layers)
        memory = self.observe(c, Inputs(token, token, memory=text))
        block = jnp.zeros((1, s.block_size), jnp.int32)
        last, _ = self(jnp.zeros((*block.shape, s.arch.model_dim)), Inputs(block, block, memory=memory))
        last, e = last[:, :1], None
        if s.draft_vocab:
            self.logits(last)
        if s.markov_rank:
            e = self.markov.embed(token)
            self.markov.bias(self.markov.advance(e, last, jnp.zeros_like(e))[0])
        if s.confidence != "none":
            self.confidence(last, e)
        if s.selector_rank:
            self.selector.scores(self.selector.context(token, last), token[..., None])

    def initial(self, key: Array) -> Params:
        """Returns random parameters."""
        return nn.unbox(self.init(key, method="everything"))
