"""A trained head: network, parameters and draft vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.shapes import Params


@dataclass(frozen=True)
class Head:
    """A head as it is loaded, trained and saved.

    Attributes:
      net: its network.
      params: its parameters.
      ids_W: the target's id of each token of its vocabulary, int32, ascending; None where it knows all tokens.
      config: published with the target, of a layer of multi-token prediction, which is stored under its names.
    """

    net: DraftHead | BlockHead | Medusa | Mtp
    params: Params
    ids_W: np.ndarray | None = None
    config: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        """Method of speculation, in the words of ``speculative_config``."""
        if isinstance(self.net, Medusa):
            return "medusa"
        if isinstance(self.net, Mtp):
            return "mtp"
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
