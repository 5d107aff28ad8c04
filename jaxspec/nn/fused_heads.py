"""Queries, keys and values by their kernel, which reads the parts of their product and writes into the cache."""

from collections.abc import Mapping
from typing import Any

from jaxspec.cache.addressing import LayerCache, StreamSpec
from jaxspec.cache.window import Window
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.matrix import Matrix
from jaxspec.nn.rope import RopeSpec
from jaxspec.shapes import Array
from pallas_kernels.heads_to_cache.api import OP, Heads, case_name, heads_to_cache, obstacles
from pallas_kernels.select import choose


def heads_by_kernel(
    x_BTX: Array, qkv: Any, params: Mapping[str, Any], inputs: Inputs, stream: StreamSpec, rope: RopeSpec | None,
    *, dtype: Any, norm: tuple[float, float] = (0.0, 0.0),
) -> tuple[Array, LayerCache] | None:  # fmt: skip
    """Projects, normalizes, rotates, and writes keys and values, in two launches.

    Args:
      x_BTX: what the layer reads.
      qkv: weights [X, G, R + 2, C].
      params: ``bias``, ``q_norm`` and ``k_norm``, where there are such.
      inputs: positions, and the memory that is written.
      stream: how keys and values lie in the memory.
      rope: rotation, None for none.
      dtype: of products.
      norm: epsilon and offset of the norms.

    Returns:
      Queries [B, T, H, C], and the memory with the T positions written; None where no kernel computes this.
    """
    window = inputs.cache_window
    if window is None or not isinstance(qkv, Matrix) or qkv.kernels not in ("triton", "interpret"):
        return None
    _, kv_heads, group, width = qkv.shape
    count = positions_of(x_BTX, window)
    turn = (0, False, False) if rope is None else (rope.dim, rope.interleaved, rope.last)
    heads = Heads(kv_heads, group - 2, width, *turn, *norm, count, stream.reach is not None, window.layer_pages)
    x_MX, pages = x_BTX.reshape(-1, x_BTX.shape[-1]), (inputs.memory["k"], inputs.memory["v"])
    choice = choose(OP, case_name(len(x_MX), heads), qkv.kernels, "cuda", obstacles(heads, pages[0]))
    part_SMN = None if choice.implementation == "xla" else qkv.parts(x_MX, dtype)
    if part_SMN is None:
        return None
    where = where_of(inputs, window, stream, rope)
    q_MHC, k_pages, v_pages = heads_to_cache(
        part_SMN, pages, heads, params={name: x.whole for name, x in params.items()},
        where=where, layer=qkv.layer, implementation=choice,
    )  # fmt: skip
    return q_MHC.reshape(*x_BTX.shape[:2], -1, width), {**inputs.memory, "k": k_pages, "v": v_pages}


def positions_of(x_BTX: Array, window: Window) -> int:
    """Returns the positions of a row, T, also where hidden states are packed."""
    return x_BTX.shape[1] if window.packing is None else window.packing.index_BT.shape[1]


def where_of(inputs: Inputs, window: Window, stream: StreamSpec, rope: RopeSpec | None) -> dict[str, Array]:
    """Returns where a kernel writes the positions of a forward, and their angles, see ``heads_to_cache``."""
    table_BJ = window.table_BJ if stream.pooled else None
    where = {
        "first": window.first_B, "table": table_BJ, "row": window.row_B if table_BJ is None else None,
        "base": None if window.layer is None else window.layer.reshape(1),
        "position": None if window.packing is None else window.packing.position_M,
    }  # fmt: skip
    if rope is not None:
        angles = inputs.rotation(rope)
        where |= {n: x.reshape(-1, x.shape[-1]) for n, x in zip(("cos", "sin"), angles, strict=True)}
    return {name: x for name, x in where.items() if x is not None}
