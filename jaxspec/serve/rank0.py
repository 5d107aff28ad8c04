"""Lets process 0 decide for all processes, whose clocks differ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import Control, Decision, Outcome, Request
from jaxspec.sharding import hosts
from jaxspec.topology import AnyTopology


@dataclass(frozen=True)
class DecidedByRank0(Control):
    """A control of which every process takes process 0's decisions."""

    control: Control

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        return self.control.arms

    def choose(self, rows: int, waiting: int, requests: Sequence[Request] = (), steps: int | None = None) -> Decision:
        own = self.control.choose(rows, waiting, requests, steps)
        arm, probe, min_rows = hosts.broadcast_arrays(
            np.array([self.arms.index(own.arm), own.probe, own.min_rows], np.int32)
        ).tolist()
        return replace(own, arm=self.arms[arm], probe=bool(probe), min_rows=min_rows)

    def record(self, decision: Decision, outcome: Outcome) -> None:
        self.control.record(decision, outcome)


def decide_by_rank0(control: Control) -> Control:
    """Wraps a control that looks at clocks, where there are several processes."""
    return DecidedByRank0(control) if hosts.is_multiprocess() and isinstance(control, Adaptive) else control


def adaptive_of(control: Control) -> Adaptive | None:
    """Returns the adaptive control in it, None where it follows a fixed rule."""
    control = control.control if isinstance(control, DecidedByRank0) else control
    return control if isinstance(control, Adaptive) else None
