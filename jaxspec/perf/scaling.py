"""Tokens per second by number of devices: what the mesh sends, how often, and what speculation is worth there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.perf.cost import Mesh
from jaxspec.perf.links import collectives
from jaxspec.perf.planner import BatchPlan, Question, plan_batch


@dataclass(frozen=True)
class Scale:
    """One number of devices.

    Attributes:
      mesh: of devices.
      batch: what is best there, all rows of all devices together.
      exchanges, sums: all-to-alls and all-reduces of a pass, the same for plain decoding and for verification.
      plain_bytes, verify_bytes: that a device sends to others in a pass with 1 and with K + 1 positions per row.
      far_share: of these bytes, those that leave the node.
      efficiency: tokens per second and device, speculation included, over those of the smallest mesh that fits.
    """

    mesh: Mesh
    batch: BatchPlan
    exchanges: int
    sums: int
    plain_bytes: float
    verify_bytes: float
    far_share: float
    efficiency: float | None

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self.mesh.devices


def scaling(questions: Sequence[Question], rows: int, node: int) -> tuple[Scale, ...]:
    """Predicts weak scaling: every device brings rows."""
    scales: list[Scale] = []
    first = None
    for question in questions:
        mesh = question.mesh
        best = plan_batch(question, rows * mesh.devices)
        local = math.ceil(rows * mesh.devices / (mesh.data * mesh.expert))
        plain, verify = (collectives(question.model, local * n, mesh, node) for n in (1, best.best.positions))
        near, far = (sum(c.count * getattr(c, part) for c in verify) for part in ("near_bytes", "far_bytes"))
        each = best.best.tok_per_s / mesh.devices
        first = each if first is None and best.memory.fits else first
        scales.append(
            Scale(
                mesh=mesh,
                batch=best,
                exchanges=sum(c.count for c in verify if c.kind == "exchange"),
                sums=sum(c.count for c in verify if c.kind == "sum"),
                plain_bytes=sum(c.count * (c.near_bytes + c.far_bytes) for c in plain),
                verify_bytes=near + far,
                far_share=far / (near + far) if near + far else 0.0,
                efficiency=each / first if first and best.memory.fits else None,
            )
        )
    return tuple(scales)
