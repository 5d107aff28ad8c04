"""Queries, keys and values by their kernel, which reads the parts of their product and writes into the cache."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxspec.cache.addressing import LayerCache, StreamSpec
from jaxspec.cache.window import Window
from jaxspec.nn.devices import Over
from jaxspec.nn.fused_attention import rows_elsewhere
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
    devices, split = qkv.devices, qkv.devices.over_heads(kv_heads)
    count, ring, own_heads = positions_of(x_BTX, window), stream.reach is not None, kv_heads // devices.size(split)
    turn = (0, False, False) if rope is None else (rope.dim, rope.interleaved, rope.last)
    heads = Heads(own_heads, group - 2, width, *turn, *norm, count, ring, window.layer_pages)
    x_MX, pages = x_BTX.reshape(-1, x_BTX.shape[-1]), (inputs.memory["k"], inputs.memory["v"])
    blocked = obstacles(heads, pages[0]) + rows_elsewhere(devices, window, stream)
    choice = choose(OP, case_name(devices.own_rows(len(x_MX)), heads), qkv.kernels, "cuda", blocked)
    part_SMGQC = None if choice.implementation == "xla" else qkv.parts(x_MX, dtype)
    if part_SMGQC is None:
        return None
    where = where_of(inputs, window, stream, rope)

    def compute(part_SMGQC: Array, pages: Any, params: dict[str, Array], where: dict[str, Array], layer: Array | None):
        part_SMN = part_SMGQC.reshape(*part_SMGQC.shape[:2], -1)
        return heads_to_cache(part_SMN, pages, heads, params=params, where=where, layer=layer, implementation=choice)

    over = devices.over_rows(len(x_BTX))
    page = P(over, split)
    q_MHC, k_pages, v_pages = devices.run(
        compute, (part_SMGQC, pages, {name: x.whole for name, x in params.items()}, where, qkv.layer),
        (P(None, over, split), (page, page), {name: x.specs for name, x in params.items()}, specs_of(where, over), P()),
        (page, page, page),
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


def specs_of(where: Mapping[str, Array], over: Over) -> dict[str, P]:
    """Returns how what ``where_of`` gives is split, with rows over axes of the mesh."""
    return {name: P() if name == "base" else P(over) for name in where}
