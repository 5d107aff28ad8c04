"""A trained head: network, parameters and draft vocabulary."""

from dataclasses import dataclass

import numpy as np

from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.shapes import Params


@dataclass(frozen=True)
class Head:
    """A head as it is loaded, trained and saved.

    Attributes:
      net: its network.
      params: its parameters.
      ids_W: the target's id of each token of its vocabulary, int32, ascending; None where it knows all tokens.
    """

    net: DraftHead | BlockHead | Medusa
    params: Params
    ids_W: np.ndarray | None = None

    @property
    def kind(self) -> str:
        """Method of speculation, in the words of ``speculative_config``."""
        if isinstance(self.net, Medusa):
            return "medusa"
        spec = self.net.spec
        if isinstance(spec, BlockSpec):
            if spec.from_anchor or spec.markov_rank or spec.confidence != "none":
                return "dspark"
            return "dflash2" if spec.conv_taps else "dflash"
        if spec.reads.shared_outputs or spec.routing:
            return "shared_expert"
        if spec.mask_token is not None:
            return "peagle"
        return "eagle" if spec.join == "product" else "eagle3"
