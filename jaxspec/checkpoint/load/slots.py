"""Slots of placed experts: which expert's weights fill each slot, and the router's table of slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoint.files.fingerprint import digests
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.policy import Slots
from jaxspec.perf.expert_placement import Placement, contiguous, slots_by_expert

TABLE = "slots_EX"


@dataclass(frozen=True)
class ExpertSlots:
    """Slots of one expert layer.

    Attributes:
      by_expert: slots of each expert.
      empty: slots that nobody asks for.
    """

    by_expert: tuple[tuple[int, ...], ...]
    empty: tuple[int, ...]

    def filled_by(self, expert: int) -> tuple[int, ...]:
        """Returns slots that get an expert's weights; empty slots get expert 0's, for they need some."""
        return self.by_expert[expert] + (self.empty if expert == 0 else ())

    def table(self, replicas: int) -> np.ndarray:
        """Returns the slots of each expert as the network reads them, padded with -1; int32 [E, X]."""
        table_EX = np.full((len(self.by_expert), replicas), -1, np.int32)
        for expert, slots in enumerate(self.by_expert):
            table_EX[expert, : len(slots)] = slots
        return table_EX


def _expert_slots(slots: tuple[int, ...], experts: int) -> ExpertSlots:
    by_expert = slots_by_expert(slots, experts)
    used = {slot for of in by_expert for slot in of}
    return ExpertSlots(tuple(map(tuple, by_expert)), tuple(s for s in range(len(slots)) if s not in used))


def check_placement(placement: Placement, config: Mapping[str, Any], arch: ArchSpec, mesh: Mesh | None) -> None:
    """Checks that a placement was made for this model and as many devices.

    Raises:
      ConfigError: it was made for another model or mesh.
    """
    devices = None if mesh is None else mesh.shape["expert"]
    if devices != placement.devices:
        words = "there is no mesh" if devices is None else f"the mesh has {devices}"
        raise ConfigError(
            f"expert_placement: made for {placement.devices} devices along the axis expert, {words}; give "
            f'mesh={{"expert": {placement.devices}}}, or make another with jaxspec inspect --balance'
        )
    digest = digests(config)["config_digest"]
    routed = {y: layer.ffn.experts for y, layer in enumerate(arch.layers) if isinstance(layer.ffn, MoeSpec)}
    placed = {layer.layer: len(layer.slots) - placement.redundant for layer in placement.layers}
    if placement.model.get("config_digest") != digest or placed != routed:
        raise ConfigError(
            f"expert_placement: made for another model ({placement.model.get('name', 'of no name')}, "
            f"{len(placed)} expert layers; this one has {len(routed)} and another config); make one for this model "
            "with jaxspec inspect --balance"
        )


def slots_for(placement: Placement | None) -> Slots | None:
    """Returns the part of a placement that programs depend on."""
    if placement is None:
        return None
    most = max(layer.slots.count(e) for layer in placement.layers for e in set(layer.slots) - {-1})
    return Slots(placement.redundant, most)


def slots_of_model(placement: Placement | None) -> dict[str, ExpertSlots]:
    """Returns slots by the path of their layer, empty without a placement."""
    if placement is None:
        return {}
    return {
        f"layers_{layer.layer}/ffn": _expert_slots(layer.slots, len(layer.slots) - placement.redundant)
        for layer in placement.layers
    }


def slots_of_mtp(arch: ArchSpec, slots: Slots | None, mesh: Mesh | None) -> dict[str, ExpertSlots]:
    """Returns slots of the layers of multi-token prediction, whose load nobody measures: experts in their own order."""
    if slots is None or mesh is None:
        return {}
    return {
        f"mtp_{n}/block/ffn": _expert_slots(
            contiguous(layer.ffn.experts, mesh.shape["expert"], slots.redundant), layer.ffn.experts
        )
        for n, layer in enumerate(arch.mtp)
        if isinstance(layer.ffn, MoeSpec)
    }
