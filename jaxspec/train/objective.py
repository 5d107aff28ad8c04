"""What a head is trained towards: the target, the draft vocabulary, and the losses."""

from dataclasses import replace
from typing import Any

from jaxspec.models.block_head import BlockHead
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer, head
from jaxspec.native.packing import Packed, unpack
from jaxspec.protocol import NO_CAPTURE, CaptureSpec
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params
from jaxspec.train.settings import LossSettings

Net = DraftHead | BlockHead | Medusa | Mtp | Transformer


@pytree
class HeadObjective:
    """What does not change while a head is trained; its arrays go to the compiled update as arguments.

    Attributes:
      target_params: the target's parameters.
      ids_W: the target's id of each token of the draft vocabulary, None for all tokens.
      target: its network.
      net: what is trained: a head, or a draft model.
      loss: losses and their weights.
      positions: of a row whose logits exist at a time, 0 for few enough.
      remat: whether each round is computed again for its gradient instead of kept.
      product: what the target's vocabulary product reads, as XLA does, of the draft vocabulary alone where only that
        counts; None for its own parameters.
      vocabulary: whether the network's own vocabulary product is trained.
    """

    target_params: Params
    ids_W: Array | None
    target: Transformer = static()
    net: Net = static()
    loss: LossSettings = static(default_factory=LossSettings)
    positions: int = static(default=0)
    remat: bool = static(default=False)
    product: Params | None = None
    vocabulary: bool = static(default=True)

    @property
    def knows(self) -> Array | None:
        """The draft vocabulary among the tokens that ``target_logits`` are of, None for all of them."""
        return None if self._size != self.target.arch.vocab_size else self.ids_W

    @property
    def _size(self) -> int:
        """Tokens of the target's vocabulary product."""
        return _tokens(self._ends)

    @property
    def _ends(self) -> Any:
        """The parameters that it reads, among others."""
        leaves: Any = self.target_params["params"]
        return {**leaves, **(self.product or {})}

    def target_logits(self, last: Array) -> Array:
        """Computes the target's logits at final hidden states, float32 [..., V]; heads may be trained through them."""
        return _by_xla(self.target, self._ends, last)

    def model_logits(self, params: Params, last: Array) -> Array:
        """Computes a draft model's logits at its final hidden states, float32 [..., V], of its own product."""
        assert isinstance(self.net, Transformer), "asked of draft models"
        own: Any = params["params"]
        return _by_xla(self.net, {**own, **(cut_product(params, self.ids_W) or {})}, last)

    @property
    def reads(self) -> CaptureSpec:
        """The streams of the target that the head reads."""
        if isinstance(self.net, Mtp):
            return self.net.joins
        return self.net.spec.reads if isinstance(self.net, DraftHead | BlockHead) else NO_CAPTURE

    @property
    def reads_last(self) -> bool:
        """Whether the target's last hidden states are read for more than the logits of trained tokens."""
        if isinstance(self.net, Mtp):
            return not self.net.joins.taps
        if isinstance(self.net, DraftHead):
            return self.net.spec.last or self.loss.feature > 0
        return isinstance(self.net, Medusa)

    @property
    def routing(self) -> tuple[int, ...]:
        """Expert layers whose choices it is trained on."""
        return self.net.spec.routing if isinstance(self.net, DraftHead) else ()


def cut_product(target: Params, ids_W: Array | None) -> Params | None:
    """Returns what a model's vocabulary product reads, as arrays, of some of its tokens if ``ids_W`` is given.

    None if these are its own parameters.
    """
    leaves: Any = target["params"]
    ends: Any = {name: leaves[name] for name in ("head_DV", "project_out_DX") if name in leaves}
    plain: Any = {name: unpack(leaf) for name, leaf in ends.items() if isinstance(leaf, Packed)}
    if ids_W is None:
        return plain or None
    if "head_DV" in leaves:
        cut = {"head_DV": plain.get("head_DV", leaves["head_DV"])[:, ids_W]}
    else:
        cut = {"embed_VD": leaves["embed_VD"][ids_W]}
    if "head_bias_V" in leaves:
        cut["head_bias_V"] = leaves["head_bias_V"][ids_W]
    return plain | cut


def without_product(target: Params, product: Params | None) -> Params:
    """Returns a target's parameters without a vocabulary product that ``cut_product`` stands for."""
    leaves: Any = target["params"]
    spare = {"head_DV"} & set(product or ())
    return {"params": {name: x for name, x in leaves.items() if name not in spare}}


def _tokens(ends: Any) -> int:
    """Tokens of a vocabulary product."""
    return ends["head_DV"].shape[1] if "head_DV" in ends else len(ends["embed_VD"])


def _by_xla(net: Transformer, ends: Any, last: Array) -> Array:
    """Computes logits from what a network's vocabulary product reads, of as many tokens as that has."""
    size = _tokens(ends)
    ends = {**ends, "embed_VD": ends["embed_VD"][:size]}  # not computed but by a tied product, which has as many
    arch = replace(net.arch, vocab_size=size)
    return head(net.clone(arch=arch, policy=net.policy.update(kernels="xla")), {"params": ends}, last)
