"""Time of one pass: its bytes and products at a machine's rates, its collectives, and fixed costs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxspec.perf.cost import SHARPNESS, Mesh, ModelCost, Rates, works
from jaxspec.perf.links import link_time
from jaxspec.perf.overlap import Overlap

RATE_OF = {
    "dense": ("byte_s", "flop_s"),
    "experts": ("expert_byte_s", "expert_flop_s"),
    "kv": ("kv_byte_s", "flop_s"),
    "head": ("byte_s", "flop_s"),
    "sampling": ("byte_s", "flop_s"),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by cause: those of ``PassWork``, ``fixed`` and ``links``."""

    by_cause: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.by_cause.values())


def smooth_max(x: float, y: float, sharpness: float = SHARPNESS) -> float:
    """Computes (x^p + y^p)^(1/p): the larger one far from the ridge, up to 2^(1/p) of it if both are equal."""
    top = max(x, y)
    return top * ((x / top) ** sharpness + (y / top) ** sharpness) ** (1 / sharpness) if top > 0 else 0.0


def step_time(
    model: ModelCost,
    rates: Rates,
    *,
    rows: int,
    positions: int = 1,
    context: int = 0,
    mesh: Mesh | None = None,
    overlap: Overlap | None = None,
    head_positions: int | None = None,
) -> StepTime:
    """Computes one pass over ``positions`` positions of each row on the slowest device; arguments as for ``works``."""
    mesh = Mesh() if mesh is None else mesh
    local = math.ceil(rows / (mesh.data * mesh.expert))
    layers = sum(x.count for x in model.layers)
    fixed = rates.fixed_s + layers * rates.layer_s + local * (rates.row_s + positions * rates.position_s)
    by_cause = {"fixed": fixed, "links": link_time(model, rates, local * positions, mesh)}
    for work in works(
        model,
        rows=rows,
        positions=positions,
        context=context,
        mesh=mesh,
        overlap=overlap,
        head_positions=head_positions,
    ):
        byte_s, flop_s = (getattr(rates, name) for name in RATE_OF[work.cause])
        time_s = work.count * smooth_max(work.size_bytes * byte_s, work.flops * flop_s, rates.sharpness)
        by_cause[work.cause] = by_cause.get(work.cause, 0.0) + time_s
    return StepTime(by_cause)
