"""Collectives of one pass between devices: rounds that do not depend on K, and bytes that do."""

from dataclasses import dataclass

from jaxspec.perf.cost import Mesh, ModelCost, Rates

SENT_BYTES, SUM_BYTES = 2, 4  # of a number that is sent, and of one that is summed
CHOICE_BYTES = 8  # of an expert's id and its weight


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one pass.

    Attributes:
      kind: ``exchange`` (all-to-all of the expert axis) or ``sum`` (all-reduce of the tensor axis).
      count: how many, whatever K.
      near_bytes, far_bytes: that a device sends in each, within its node and beyond it.
    """

    kind: str
    count: int
    near_bytes: float
    far_bytes: float


def chance_of_a_device(devices: int, top_k: int) -> float:
    """Computes the chance that a position goes to a certain device, if its A experts fall on devices at random."""
    return 1 - (1 - 1 / devices) ** top_k


def collectives(model: ModelCost, positions: int, mesh: Mesh, node: int) -> list[Collective]:
    """Returns the collectives of one pass in which each device holds ``positions`` positions.

    Per routed layer one dispatch and one combine: a position's vector goes once to every other device that holds one
    of its experts, if those fall on devices at random, with all its choices; back comes the float32 sum over its
    experts there. Per layer two float32 sums over the tensor axis, by a ring.

    Args:
      model: what runs.
      positions: of a device: its rows times K + 1.
      mesh: of devices; those of the tensor axis lie next to each other, then those of the expert axis.
      node: devices that a fast link joins.
    """
    width, sent = model.model_dim, []
    if mesh.expert > 1:
        near = min(mesh.expert, max(node // mesh.tensor, 1))
        for layer in model.layers:
            if layer.experts:
                goes = positions * chance_of_a_device(mesh.expert, layer.top_k)
                for size in (SENT_BYTES * width + CHOICE_BYTES * layer.top_k, SUM_BYTES * width):
                    one = goes * size
                    sent.append(Collective("exchange", layer.count, (near - 1) * one, (mesh.expert - near) * one))
    if mesh.tensor > 1:
        share = 2 * (mesh.tensor - 1) / mesh.tensor * SUM_BYTES * width * positions
        count = 2 * sum(x.count for x in model.layers)
        sent.append(Collective("sum", count, *((0.0, share) if mesh.tensor > node else (share, 0.0))))
    return sent


def link_time(model: ModelCost, rates: Rates, positions: int, mesh: Mesh) -> float:
    """Computes seconds of the collectives of one pass; both kinds of links are busy at the same time."""
    total = 0.0
    for one in collectives(model, positions, mesh, rates.node):
        near_s, far_s = one.near_bytes * rates.link_byte_s, 0.0
        if one.far_bytes:
            far_s = one.far_bytes * rates.network_byte_s
        total += one.count * ((rates.network_s if one.far_bytes else rates.link_s) + max(near_s, far_s))
    return total
