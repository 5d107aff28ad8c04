"""The drafter that a head becomes for a target."""

import jax.numpy as jnp

from jaxspec.draft.eagle import HeadDrafter
from jaxspec.draft.medusa import MedusaDrafter
from jaxspec.draft.vocab_map import target_to_draft
from jaxspec.models.medusa import Medusa
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.shapes import Params
from jaxspec.topology import DynamicTree, Topology


def head_drafter(
    head: Head, target: tuple[Transformer, Params], topology: Topology | DynamicTree, block: int
) -> HeadDrafter | MedusaDrafter:
    """The drafter of a head.

    Args:
      head: what drafts.
      target: network and parameters that it drafts for.
      topology: what is drafted.
      block: positions that attention reads at a time.
    """
    net, params = target
    draft_id_V = None if head.ids_W is None else jnp.asarray(target_to_draft(head.ids_W, net.arch.vocab_size))
    if isinstance(head.net, Medusa):
        return MedusaDrafter(head.params, params, draft_id_V, head.net, net, topology)
    return HeadDrafter(head.params, params, draft_id_V, head.net, net, topology, block)
