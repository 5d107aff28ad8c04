"""Routing by its kernel, which reads the parts of the router's product and leaves rows sorted for the experts'."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxspec.nn.dense import exact_rows, is_cut
from jaxspec.nn.matrix import Matrix
from jaxspec.nn.router import RouterSpec, Routing
from jaxspec.shapes import Array
from pallas_kernels.quantized import Quantized
from pallas_kernels.route.api import OP, Routed, Scoring, case_name, obstacles, route
from pallas_kernels.row_blocks import Blocks
from pallas_kernels.select import choose

SortedRows = tuple[Array, Blocks]


def route_by_kernel(
    x_MD: Array, params: Mapping[str, Any], spec: RouterSpec, top_k: int, dtype: Any, *, live_M: Array | None,
    height: int | None,
) -> tuple[Routing, SortedRows | None] | None:  # fmt: skip
    """Routes like ``router.route`` the logits of a row's product with the router, in two launches.

    Args:
      x_MD: rows.
      params: ``router``, and where there are such ``logit`` and ``choice``, biases.
      spec: how experts are chosen.
      top_k: A.
      dtype: of products.
      live_M: rows that are sorted, bool or int32, None for all.
      height: rows per block of the experts' kernel, None where that is not to read sorted rows, as where devices have
        rows of their own.

    Returns:
      The choices, and the rows sorted by expert where asked for; None where no kernel computes this.
    """
    router, scoring = params["router"], scoring_of(spec, top_k, biased="choice" in params)
    if scoring is None or not isinstance(router, Matrix) or router.kernels not in ("triton", "interpret"):
        return None
    if spec.exact and isinstance(router.whole, Quantized):
        return None
    devices, rows = router.devices, router.devices.own_rows(len(x_MD))
    choice = choose(
        OP, case_name(rows, router.shape[1], scoring), router.kernels, "cuda", obstacles(router.shape[1], scoring)
    )
    product = router.choice(3 * rows if spec.exact and is_cut(router, dtype) else rows)
    if choice.implementation == "xla" or product is None:
        return None

    def compute(x_MD: Array, wholes: dict[str, Any], layer: Array | None, live_M: Array | None) -> Routed:
        own = Matrix(wholes["router"], layer, router.kernels)
        rows_XD, kind, thirds = exact_rows(x_MD, own, dtype) if spec.exact else (x_MD, dtype, False)
        return route(
            own.multiply(rows_XD, kind, product, summed=False),
            {name: bias for name, bias in wholes.items() if name != "router"},
            replace(scoring, thirds=thirds), layer=layer, live_M=live_M, height=height, implementation=choice,
        )  # fmt: skip

    wholes, specs = {name: w.whole for name, w in params.items()}, {name: w.specs for name, w in params.items()}
    over = devices.over_rows(len(x_MD))
    by_row = P() if over is None else P(over)  # what is sorted has no axis of rows
    routed: Routed = devices.run(compute, (x_MD, wholes, router.layer, live_M), (by_row, specs, P(), by_row), by_row)
    return Routing(routed.expert_MA, routed.weight_MA, routed.logits_ME), routed.sorted


def scoring_of(spec: RouterSpec, top_k: int, *, biased: bool) -> Scoring | None:
    """Returns what the kernel is to compute, None where it cannot."""
    if spec.soft_cap:
        return None
    if spec.kind == "sigmoid" and not biased and spec.groups == 1:
        return None  # chosen by logits, which the kernel does not
    of_the_best = spec.kind == "softmax" and spec.renormalize and not biased and spec.groups == 1
    if spec.kind == "topk_softmax" or of_the_best:
        return Scoring("softmax", top_k, scale=spec.scale)
    if spec.kind != "sigmoid":
        return None
    return Scoring(
        "sigmoid", top_k, spec.renormalize, spec.scale, spec.floor, spec.groups, spec.kept_groups, spec.members
    )
