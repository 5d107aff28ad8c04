"""Compares placements on a measured load: by layer, over all, and in batches of texts they were not made for."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.inspect.measured_load import MeasuredLoad, Predicted
from jaxspec.perf.expert_counts import KINDS, ExpertLoad, Verifications, counted, drawn
from jaxspec.perf.expert_placement import (
    VERSION,
    LayerSlots,
    Placement,
    Slots,
    balanced,
    contiguous,
    device_load,
    imbalance,
)

HOTTEST = 3
Place = Callable[[np.ndarray, int], Slots]


def balance(load: ExpertLoad, measured: MeasuredLoad | None, devices: Sequence[int], redundant: int, rows: int) -> Any:
    """Returns a report, ready for JSON.

    Args:
      load: measured now or earlier.
      measured: what it was counted on, None for an earlier record; then no batches are drawn.
      devices: numbers of devices along the axis ``expert``.
      redundant: slots beyond the experts, rounded up to what the devices divide; 0 for none.
      rows: verifications per drawn batch.
    """
    count_YE = load.of(*load.decoding)
    report: dict[str, Any] = {
        "model": load.model,
        "source": load.source,
        "positions": load.positions,
        "layers": [_layer(y, count_E) for y, count_E in zip(load.layers, count_YE, strict=True)],
        "devices": [_devices(load, measured, n, redundant, rows) for n in devices],
    }
    if measured is not None:
        report["acceptance_length"] = measured.acceptance_length
        if measured.predicted is not None:
            report["predicted"] = _predicted(load, measured.predicted, devices)
    return report


def placement_for(load: ExpertLoad, devices: int, redundant: int) -> Placement:
    """Returns the balanced placement of every expert layer, for what decoding chose."""
    count_YE = load.of(*load.decoding)
    slots = redundant + _missing(len(count_YE[0]) + redundant, devices)
    layers = tuple(
        LayerSlots(y, balanced(count_E.tolist(), devices, slots))
        for y, count_E in zip(load.layers, count_YE, strict=True)
    )
    return Placement(VERSION, load.model, devices, slots, layers, load.source)


def _missing(slots: int, devices: int) -> int:
    """Returns the slots to the next multiple of the devices."""
    return -slots % devices


def _layer(y: int, count_E: np.ndarray) -> dict[str, Any]:
    share_E = count_E / max(count_E.sum(), 1)
    hottest = np.argsort(-count_E, kind="stable")[:HOTTEST]
    return {
        "layer": y, "experts": len(count_E), "hottest": [(int(e), float(share_E[e])) for e in hottest],
        "dead": np.flatnonzero(count_E == 0).tolist(),
    }  # fmt: skip


def _placements(redundant: int) -> dict[str, Place]:
    """Returns by name how slots come from the load and the number of devices."""

    def spare(load_E: np.ndarray, devices: int, wanted: int) -> int:
        return wanted + _missing(len(load_E) + wanted, devices)

    placements: dict[str, Place] = {
        "contiguous": lambda load_E, n: contiguous(len(load_E), n, spare(load_E, n, 0)),
        "balanced": lambda load_E, n: balanced(load_E.tolist(), n, spare(load_E, n, 0)),
    }
    if redundant:
        placements["redundant"] = lambda load_E, n: balanced(load_E.tolist(), n, spare(load_E, n, redundant))
    return placements


def _devices(load: ExpertLoad, measured: MeasuredLoad | None, n: int, redundant: int, rows: int) -> dict[str, Any]:
    """Compares all placements on so many devices."""
    count_YE, placements = load.of(*load.decoding), {}
    for name, slots_for in _placements(redundant).items():
        slots = [slots_for(count_E, n) for count_E in count_YE]
        each = [_imbalance(c, s, n) for c, s in zip(count_YE, slots, strict=True)]
        placements[name] = {
            "slots": len(slots[0]), "mean": float(np.mean(each)), "worst": max(each), "by_layer": each,
            "kinds": {
                kind: float(np.mean([_imbalance(c, s, n) for c, s in zip(load.of(kind), slots, strict=True)]))
                for kind in KINDS if load.positions[kind]
            },
        }  # fmt: skip
        if measured is not None:
            placements[name]["batches"] = _batches(measured.seen, count_YE, slots_for, n, rows)
    return {"devices": n, "placements": placements}


def _imbalance(count_E: np.ndarray, slots: Slots, devices: int) -> float:
    return float(imbalance(device_load(count_E, slots, devices)))


def _batches(
    seen: Verifications, count_YE: Sequence[np.ndarray], slots_for: Place, n: int, rows: int
) -> dict[str, float] | None:
    """Returns the imbalance in batches of one half of the texts, placed by the other; None for a single text."""
    halves = [seen.text_V % 2 == half for half in (0, 1)]
    if not all(half.any() for half in halves):
        return None
    sizes, figures = [len(count_E) for count_E in count_YE], []
    for own, other in (halves, halves[::-1]):
        made_by = seen.of(own)
        counts = counted(made_by.expert_VTYA[made_by.live_VT], sizes)
        slots = {y: slots_for(np.array(count_E), n) for y, count_E in enumerate(counts)}
        with_drafts, plain = (drawn(some, slots, n, rows) for some in (seen.of(other), seen.of(other).plain))
        figures.append((plain.rows, with_drafts.rows, with_drafts.experts, with_drafts.read))
    return dict(zip(("plain_rows", "rows", "experts", "read"), np.mean(figures, axis=0).tolist(), strict=True))


def _predicted(load: ExpertLoad, predicted: Predicted, devices: Sequence[int]) -> dict[str, Any]:
    """Returns the imbalance of drafts placed by a head's predictions, and by what the target then chose."""
    said, came = (list(map(np.array, x)) for x in (predicted.by_head, predicted.by_target))
    report: dict[str, Any] = {"layers": [load.layers[y] for y in predicted.layers], "devices": []}
    for n in devices:
        places = _placements(0)
        by_said, by_came = ([places["balanced"](c, n) for c in counts] for counts in (said, came))
        plain = [places["contiguous"](c, n) for c in said]

        def mean(counts: list[np.ndarray], slots: list[Slots], n: int = n) -> float:
            return float(np.mean([_imbalance(c, s, n) for c, s in zip(counts, slots, strict=True)]))

        report["devices"].append({
            "devices": n, "contiguous_predicted": mean(said, plain), "contiguous": mean(came, plain),
            "balanced_by_prediction_predicted": mean(said, by_said), "balanced_by_prediction": mean(came, by_said),
            "balanced": mean(came, by_came),
        })  # fmt: skip
    return report
