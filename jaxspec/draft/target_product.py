"""The target's vocabulary product as drafters read it: whole, or of the tokens alone that they draft."""

from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxspec.draft.draft_vocab import DraftVocab
from jaxspec.draft.network_drafter import NetworkDrafter
from jaxspec.models.transformer import HEAD, PROJECT_OUT, Transformer, head, vocabulary_logits
from jaxspec.native.packing import Packed, pack, unpack
from jaxspec.nn.param import Param, as_matrix
from jaxspec.nn.shardings import named_shardings
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array, Params
from jaxspec.sharding.placement import mesh_of
from pallas_kernels.quantized import Quantized, widen


@pytree
class CutProduct:
    """A model's vocabulary product for W of its V tokens (FR-Spec, Zhao 2025, 2502.14856).

    Attributes:
      weights: ``head_DV`` of W columns, and where the model has them ``head_bias_V`` and ``project_out_DX``.
      net: the model's network.
    """

    weights: dict[str, Any]
    net: Transformer = static()

    @classmethod
    def of(cls, net: Transformer, params: Params, token_W: Array) -> "CutProduct":
        """Copies what the vocabulary product reads for some tokens; quantized weights are widened to bfloat16.

        Args:
          net: a model's network.
          params: its parameters.
          token_W: ids of the tokens, ascending.
        """
        own: Any = params["params"]
        weights: dict[str, Any] = {"project_out_DX": own["project_out_DX"]} if "project_out_DX" in own else {}
        if "head_bias_V" in own:
            weights["head_bias_V"] = own["head_bias_V"][token_W]
        whole = own.get("head_DV")
        if whole is None:
            weights["head_DV"] = _plain(own["embed_VD"])[token_W].T
        elif isinstance(whole, Packed):
            weights["head_DV"] = pack(unpack(whole)[:, token_W])
        else:
            weights["head_DV"] = _plain(whole)[:, token_W]
        mesh = mesh_of(params)
        if mesh is not None:
            weights = jax.device_put(weights, named_shardings(weights, mesh, allow_replication=True))
        return cls(weights, net)

    def logits(self, last: Array) -> Array:
        """Logits of final hidden states, float32 [..., W]."""

        def read(param: Param) -> Any:
            weight = self.weights.get(param.name)
            by_kernel = weight is not None and self.net.policy.compute.kernels != "xla"
            return as_matrix(weight, param, self.net.policy) if by_kernel else weight

        return vocabulary_logits(self.net, last, read(HEAD), self.weights.get("head_bias_V"), read(PROJECT_OUT))


def _plain(weight: Array | Quantized) -> Array:
    return widen(weight, jnp.bfloat16) if isinstance(weight, Quantized) else weight


class TargetDrafter(NetworkDrafter):
    """Drafts with the target's embedding and vocabulary product where it has none of its own.

    Attributes:
      base: the target's parameters.
      target: the target's network.
      product: the target's vocabulary product for the tokens of ``vocab``; None for all tokens.
    """

    base: Params
    target: Transformer
    product: CutProduct | None

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.target.arch.vocab_size

    def with_vocab(self, vocab: DraftVocab) -> Self:
        return replace(self, vocab=vocab, product=CutProduct.of(self.target, self.base, vocab.token))

    def update_target(self, params: Params) -> Self:
        new = replace(self, base=params)
        return new if self.product is None or self.vocab is None else new.with_vocab(self.vocab)

    def target_logits(self, last: Array) -> Array:
        """Computes the target's logits at hidden states, float32 [..., V], or [..., W] where its product is cut."""
        return head(self.target, self.base, last) if self.product is None else self.product.logits(last)
