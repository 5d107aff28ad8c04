"""Settings of heads that draft blocks, and of their losses: the tables ``[block]`` of a head and of a loss."""

from typing import Literal

import msgspec

from jaxspec.errors import ConfigError


class BlockSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A block and what makes its drafts follow one another; see ``models.block_head.BlockSpec``.

    Attributes:
      size: rows of a block, the anchor's included.
      from_anchor: whether the anchor's row drafts, too; none is as the head's kind is published.
      window: positions that every row sees; none for all.
      markov_rank, markov_kind: of the bias from the token before, 0 for none.
      confidence: what the prediction of acceptance reads besides the hidden state.
      conv_taps, conv_group: rows and channels of the convolution, 0 for none.
      selector_rank, selector_top_k: of the choice among the best candidates of each row, 0 for none.
    """

    size: int = 8
    from_anchor: bool | None = None
    window: int | None = None
    markov_rank: int = 0
    markov_kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: Literal["none", "hidden", "markov"] = "none"
    conv_taps: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        least = {"size": 1, "markov_rank": 0, "conv_taps": 0, "conv_group": 1, "selector_rank": 0, "selector_top_k": 1}
        wrong = [f"{name} must be at least {bound}" for name, bound in least.items() if getattr(self, name) < bound]
        if self.window is not None and self.window < 1:
            wrong.append("window must be at least 1")
        if wrong:
            raise ConfigError(f"head.block: {', '.join(wrong)}")


class BlockLoss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The losses of heads that draft blocks, beside that over tokens.

    Attributes:
      anchors: blocks per packed row, at random trained positions.
      tv: weight of the total variation; DSpark's L1 distance is twice that.
      confidence: weight of the cross-entropy of the predicted acceptance.
      selector: weight of the cross-entropy among the candidates.
      pace: alpha of D-PACE (2605.18810), which weighs a draft by how likely the drafts before it are right; 0 weighs
        drafts by ``decay`` alone.
    """

    anchors: int = 512
    tv: float = 0.0
    confidence: float = 0.0
    selector: float = 0.0
    pace: float = 0.0

    def __post_init__(self) -> None:
        if self.anchors < 1 or min(self.tv, self.confidence, self.selector) < 0 or not 0 <= self.pace < 1:
            raise ConfigError(
                f"loss.block: anchors must be at least 1, weights at least 0 and pace from 0 to below 1; got {self}"
            )
