"""Machines that predict times: by a data sheet and assumptions, or as calibrated."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Protocol

from jaxspec.perf.calibration import Predictor
from jaxspec.perf.cost import Mesh, ModelCost, Rates
from jaxspec.perf.drafting import Branching, DraftCost, draft_time
from jaxspec.perf.hardware import Hardware
from jaxspec.perf.overlap import PUBLISHED_AT_4, AssumedOverlap, Overlap
from jaxspec.perf.pass_time import step_time


class Machine(Protocol):
    """Predicts times of one model on one machine, in seconds."""

    def verify_s(self, rows: int, positions: int, context: int) -> float:
        """Predicts one pass of the target with ``positions`` per row; 1 is a plain step."""
        ...

    def draft_s(self, draft: DraftCost, rows: int, branching: Branching, context: int) -> float:
        """Predicts drafting for one step."""
        ...

    def touched(self, rows: int, positions: int) -> float:
        """Predicts distinct experts of a routed layer, 0 for a dense model."""
        ...

    def prefill_s(self, tokens: int, chunk: int) -> float:
        """Predicts reading one row's prompt in chunks, without logits."""
        ...


@dataclass(frozen=True)
class AssumedMachine:
    """From a data sheet and assumptions, or from fitted rates where something else than the fitted cells is asked."""

    model: ModelCost
    rates: Rates
    mesh: Mesh = field(default_factory=Mesh)
    overlap: Overlap = field(default_factory=AssumedOverlap)

    def verify_s(self, rows: int, positions: int, context: int) -> float:
        return step_time(
            self.model,
            self.rates,
            rows=rows,
            positions=positions,
            context=context,
            mesh=self.mesh,
            overlap=self.overlap,
        ).total_s

    def draft_s(self, draft: DraftCost, rows: int, branching: Branching, context: int) -> float:
        return draft_time(
            draft, self.rates, rows=rows, branching=branching, context=context, mesh=self.mesh, overlap=self.overlap
        )

    def touched(self, rows: int, positions: int) -> float:
        layer = self.model.routed
        group = math.ceil(rows / self.mesh.data)
        return 0.0 if layer is None else self.overlap.touched(layer.experts, layer.top_k, group, positions)

    def prefill_s(self, tokens: int, chunk: int) -> float:
        firsts = range(0, tokens, chunk)
        return sum(
            step_time(
                self.model, self.rates, rows=1, positions=min(chunk, tokens - first), context=first, mesh=self.mesh,
                overlap=AssumedOverlap(1.0), head_positions=0,
            ).total_s
            for first in firsts
        )  # fmt: skip


@dataclass(frozen=True)
class CalibratedMachine:
    """From a calibration; ``error`` is a relative error of the ratio of verifying to plain decoding."""

    predictor: Predictor
    error: float = 0.0

    @cached_property
    def _formula(self) -> AssumedMachine:
        overlap = self.predictor.calibration.overlap or AssumedOverlap()
        return AssumedMachine(self.predictor.model, self.predictor.rates, overlap=overlap)

    def verify_s(self, rows: int, positions: int, context: int) -> float:
        time_s = self.predictor.verify_s(rows, positions - 1, context)
        return time_s * (1 + self.error) if positions > 1 else time_s

    def draft_s(self, draft: DraftCost, rows: int, branching: Branching, context: int) -> float:
        # The table holds for the drafter that was measured, as a chain.
        measured = self.predictor.calibration.settings.get("drafter")
        chain = all(width == 1 for width in branching)
        if draft.kind == measured and chain and any(p.length for p in self.predictor.calibration.points):
            return self.predictor.draft_s(rows, len(branching), context)
        return self._formula.draft_s(draft, rows, branching, context)

    def touched(self, rows: int, positions: int) -> float:
        return self._formula.touched(rows, positions)

    def prefill_s(self, tokens: int, chunk: int) -> float:
        # Prompts are not measured.
        return self._formula.prefill_s(tokens, chunk)


def assumed_machines(
    model: ModelCost, hardware: Hardware, mesh: Mesh, overlap: Overlap | None = None
) -> tuple[Machine, ...]:
    """Returns the likely machine first, then every combination of low and high assumptions."""
    overlaps = [overlap] * 3 if overlap else [AssumedOverlap(x) for x in PUBLISHED_AT_4]
    machines = [AssumedMachine(model, hardware.rates(), mesh, overlaps[1])]
    for speed, slow, o in product(("low", "high"), ("low", "high"), (overlaps[0], overlaps[2])):
        machines.append(AssumedMachine(model, hardware.rates(speed, slow), mesh, o))
    return tuple(machines)


def calibrated_machines(predictor: Predictor) -> tuple[Machine, ...]:
    """Returns the calibrated machine, and the same with twice the formula's held-out error either way."""
    fit = predictor.calibration.fit
    error = 2 * max(fit.held_out_error or fit.error, predictor.calibration.noise_floor)
    return (
        CalibratedMachine(predictor),
        CalibratedMachine(predictor, error),
        CalibratedMachine(predictor, -min(error, 0.5)),
    )


def default_mesh(model: ModelCost, devices: int) -> Mesh:
    """Spreads experts over as many devices as divide them; a dense model's matrices likewise."""
    ways = [n for n in range(devices, 0, -1) if devices % n == 0]
    if model.routed is not None:
        best = next(n for n in ways if all(x.experts % n == 0 for x in model.layers if x.experts))
        return Mesh(data=devices // best, expert=best)
    best = next(n for n in ways if model.heads % n == 0 and (not model.kv_heads or model.kv_heads % n == 0))
    return Mesh(data=devices // best, tensor=best)
