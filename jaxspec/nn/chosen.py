"""What an indexer chose for each query of what is cached, by kernels of a GPU."""

import jax.numpy as jnp

from jaxspec.cache.addressing import StreamSpec
from jaxspec.cache.window import Window
from jaxspec.nn.policy import Policy
from jaxspec.pytree import pytree
from jaxspec.shapes import Array
from pallas_kernels.choose_places.api import OP, case_name, choose_places, obstacles
from pallas_kernels.select import choose
from pallas_kernels.where import Where


@pytree
class Chosen:
    """Entries of a cache that each query attends to.

    Attributes:
      place_BTK: int32, their numbers in ascending order, anything after the last; None for the first ones.
      count_BT: int32, how many there are.
    """

    place_BTK: Array | None
    count_BT: Array


Selection = Array | Chosen
"""Whether a reader keeps an entry, [X, T', S], or what each query chose."""


def mask_of(selection: Selection | None, pages_PGZC: Array, stream: StreamSpec, window: Window) -> Array | None:
    """Returns whether a reader keeps an entry of a stream, [X, T', S]; None where all are kept."""
    if not isinstance(selection, Chosen):
        return selection
    if selection.place_BTK is None:
        return None
    room = where_read(stream, window).room(pages_PGZC)
    rank_K = jnp.arange(selection.place_BTK.shape[2], dtype=jnp.int32)
    place_BTK = jnp.where(rank_K < selection.count_BT[..., None], selection.place_BTK, room)
    nowhere_XS = jnp.zeros((selection.count_BT.size, room), bool)
    query_X1 = jnp.arange(selection.count_BT.size, dtype=jnp.int32)[:, None]
    kept_XS = nowhere_XS.at[query_X1, place_BTK.reshape(query_X1.size, -1)].set(True, mode="drop")
    each = selection.count_BT.shape if window.path_BTJ is None else (-1, 1)
    return kept_XS.reshape(*each, room)


def where_read(stream: StreamSpec, window: Window) -> Where:
    """Returns where kernels read the entries of a stream."""
    table_BJ = window.table_BJ if stream.pooled else None
    return Where(window.start_B, window.path_BTJ, table_BJ, window.row_B, window.layer, window.layer_pages)


def choose_by_kernel(
    queries: tuple[Array, Array], pages_PGZC: Array, seen_BT: Array, stream: StreamSpec, window: Window, top_k: int,
    policy: Policy,
) -> Chosen | None:  # fmt: skip
    """Scores an indexer's cached keys and chooses the best of each query; None where no kernel does.

    Args:
      queries: of the indexer, [B, T, H, C], and the weights of their heads [B, T, H].
      pages_PGZC: its keys.
      seen_BT: how many of them each query sees.
      stream: how pages are addressed.
      window: rows and positions.
      top_k: keys that each keeps.
      policy: what computes, and in which dtype.
    """
    kernels, (q_BTHC, weight_BTH) = policy.compute.whole_kernels, queries
    if kernels in ("xla", "native"):
        return None
    heads = q_BTHC.shape[2]
    blocked = obstacles(heads, pages_PGZC, wanted=kernels)
    choice = choose(OP, case_name(heads, pages_PGZC, top_k), kernels, "cuda", blocked)
    if choice.implementation == "xla":
        return None
    places = choose_places(
        q_BTHC, weight_BTH, pages_PGZC, seen_BT, top_k=top_k, dtype=policy.compute.dtype,
        where=where_read(stream, window), implementation=choice,
    )  # fmt: skip
    return Chosen(*places)
