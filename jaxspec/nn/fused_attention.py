"""Attention of new positions to a cache by its kernel; on a mesh every device attends with the heads that it has."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxspec.cache.addressing import StreamSpec
from jaxspec.cache.window import Window
from jaxspec.nn.devices import Devices, devices_of
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.matrix import Matrix, own_of
from jaxspec.nn.policy import Policy
from jaxspec.shapes import Array
from pallas_kernels.select import Choice, choose
from pallas_kernels.verify_attention.api import (
    OP,
    case_name,
    mosaic_is_faster,
    mosaic_obstacles,
    obstacles,
    verify_attention,
)


def rows_elsewhere(devices: Devices, window: Window, stream: StreamSpec) -> list[str]:
    """Returns why devices with rows of their own cannot each use the cache of these alone; empty if they can."""
    if not devices.row_axes:
        return []
    if stream.pooled and window.table_BJ is not None:
        return ["a pool of pages, which devices with rows of their own do not share"]
    return [] if window.row_B is None else ["a prompt's rows, whose caches lie on other devices"]


def attend_by_kernel(
    q_BTHC: Array,
    pages: tuple[Array, Array | None],
    inputs: Inputs,
    stream: StreamSpec,
    policy: Policy,
    *,
    scale: float,
    span: int | None,
    value_width: int,
    sinks: Array | Matrix | None,
) -> Array | None:
    """Computes what ``attend_cached`` does, float32 [B, T, H, C']; None where no kernel of a GPU computes this.

    Heads are split like the keys and values that they read; one head of keys is whole on every device, for all.
    """
    (k_pages, v_pages), window = pages, inputs.cache_window
    assert window is not None, "asked of layers with a cache"
    devices, (rows, _, heads, _), kv_heads = devices_of(policy.compute), q_BTHC.shape, k_pages.shape[1]
    split, over = devices.over_heads(kv_heads), devices.over_rows(rows)
    of_queries = devices.over_heads(heads) if kv_heads == 1 else split
    page = P(over, split)
    # Of rows by themselves: what all rows commit together stands in a step.
    prompt = window.committed and window.row_B is not None
    choice = _choice(
        heads // devices.size(of_queries), jax.tree.map(lambda x: devices.part(x, page), pages), inputs, policy,
        value_width, rows_elsewhere(devices, window, stream), prompt=prompt,
    )  # fmt: skip
    if choice.implementation == "xla":
        return None
    sinks_X: Any = own_of(sinks)
    if isinstance(sinks, Matrix) and sinks.layer is not None and window.layer is not None:
        sinks_X = sinks.whole  # a slice of it would be a copy
    given = {
        "q": (q_BTHC, P(over, None, of_queries)), "k": (k_pages, page), "v": (v_pages, page),
        "position": (inputs.position_BT, P(over)), "base": (window.layer, P()), "start_B": (window.start_B, P(over)),
        "table_BJ": (window.table_BJ if stream.pooled else None, P(over)), "row_B": (window.row_B, P(over)),
        "sinks_H": (sinks_X, P(*[None] * (sinks_X is not None and sinks_X.ndim - 1), of_queries)),
        "path_BTJ": (window.path_BTJ, P(over if window.path_BTJ is not None and len(window.path_BTJ) > 1 else None)),
    }  # fmt: skip
    given = {name: pair for name, pair in given.items() if pair[0] is not None}

    def compute(given: dict[str, Array]) -> Array:
        q_BTHC, k_pages, position_BT = (given[name] for name in ("q", "k", "position"))
        where = {name: x for name, x in given.items() if name not in ("q", "k", "v", "position")}
        return verify_attention(
            q_BTHC, k_pages, given.get("v"), position_BT, scale=scale, dtype=policy.compute.dtype,
            value_width=value_width, span=span, ring=stream.reach is not None, base_pages=window.layer_pages,
            block=window.block, prompt=prompt, implementation=choice, **where,
        )  # fmt: skip

    operands, specs = ({name: pair[n] for name, pair in given.items()} for n in (0, 1))
    return devices.run(compute, (operands,), (specs,), P(over, None, of_queries))


def _choice(
    heads: int, own: Any, inputs: Inputs, policy: Policy, value_width: int, blocked: list[str], *, prompt: bool
) -> Choice:
    """Chooses for the pages and the number of query heads that a device has."""
    window, how, k_pages = inputs.cache_window, policy.compute, own[0]
    assert window is not None, "asked of layers with a cache"
    selected = inputs.selection is not None
    blocked = blocked + obstacles(
        k_pages, value_width=value_width, block=window.block, wanted=how.kernels, selected=selected
    )
    mosaic = blocked + mosaic_obstacles(heads, own, value_width=value_width, dtype=how.dtype, prompt=prompt)
    return choose(
        OP, case_name(heads, k_pages, value_width), how.wanted_kernels, "cuda", blocked, mosaic=mosaic,
        faster=mosaic_is_faster(heads, k_pages, value_width, prompt=prompt),
    )  # fmt: skip
