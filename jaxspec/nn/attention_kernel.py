"""Attention over a layer's cache by its kernel, in the cases that the kernel covers."""

from jaxspec.cache.addressing import StreamSpec
from jaxspec.cache.window import Window
from jaxspec.nn.policy import Policy
from jaxspec.shapes import Array
from pallas_kernels.select import choose
from pallas_kernels.verify_attention.api import OP, case_name, obstacles, verify_attention


def attend_by_kernel(
    q_BTHC: Array,
    pages_PGZC: tuple[Array, Array | None],
    position_BT: Array,
    stream: StreamSpec,
    window: Window,
    policy: Policy,
    *,
    scale: float,
    span: int | None = None,
    value_width: int | None = None,
    sinks_H: Array | None = None,
    selected: bool = False,
) -> Array | None:
    """Attention of T provisional positions per row to the cache, or None where XLA computes it.

    Args:
      q_BTHC: queries, rotated.
      pages_PGZC: keys and values; without values a key begins with its value.
      position_BT: of the queries.
      stream: how both are addressed.
      window: of the forward.
      policy: what computes, and in which dtype.
      scale: of the scores.
      span: most positions that a query sees, None for all.
      value_width: C', where there are no pages of values.
      sinks_H: one more logit per head that takes probability and has no value.
      selected: whether an indexer chooses what each query sees.

    Returns:
      float32 [B, T, H, C'] or None.
    """
    kernels = policy.compute.whole_kernels
    if kernels == "xla":
        return None
    k_pages, v_pages = pages_PGZC
    wide = (k_pages.shape[3] if value_width is None else value_width) if v_pages is None else v_pages.shape[3]
    blocked = obstacles(k_pages, value_width=wide, block=window.block, wanted=kernels, selected=selected)
    choice = choose(OP, case_name(q_BTHC.shape[2], k_pages, wide), kernels, "cuda", blocked)
    if choice.implementation == "xla":
        return None
    return verify_attention(
        q_BTHC, k_pages, v_pages, position_BT, scale=scale, dtype=policy.compute.dtype, value_width=wide,
        sinks_H=sinks_H, span=span, ring=stream.reach is not None, start_B=window.start_B, path_BTJ=window.path_BTJ,
        table_BJ=window.table_BJ if stream.pooled else None, row_B=window.row_B, base=window.base, block=window.block,
        implementation=choice,
    )  # fmt: skip
