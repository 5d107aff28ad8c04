"""What all processes of a job do alike: process 0's decisions, its journal, and everybody's wish to stop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxspec.serve.adaptive import Adaptive
from jaxspec.serve.control import Control, Decision, Outcome
from jaxspec.serve.journal import Journal
from jaxspec.serve.survival import RequestSurvival
from jaxspec.sharding import hosts
from jaxspec.topology import AnyTopology


@dataclass(frozen=True)
class Agreed:
    """A control of which every process takes process 0's decisions, for their clocks differ.

    Attributes:
      control: decides.
    """

    control: Control

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        """The arms."""
        return self.control.arms

    def choose(
        self, rows: int, waiting: int, requests: RequestSurvival | None = None, steps: int | None = None
    ) -> Decision:
        """Arm of the next dispatch, process 0's."""
        own = self.control.choose(rows, waiting, requests, steps)
        word = hosts.broadcast_arrays(np.array([self.arms.index(own.arm), own.probe, own.least], np.int32))
        return replace(own, arm=self.arms[int(word[0])], probe=bool(word[1]), least=int(word[2]))

    def ahead(self, decision: Decision, rows: int, requests: RequestSurvival | None = None) -> None:
        """Thinks while a dispatch runs."""
        self.control.ahead(decision, rows, requests)

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Takes note of what came of a decision."""
        self.control.record(decision, outcome)


def agreed(control: Control) -> Control:
    """The control, of one mind in all processes where it looks at clocks."""
    return Agreed(control) if hosts.is_multiprocess() and isinstance(control, Adaptive) else control


def decider(control: Control) -> Control:
    """The control that decides, of one that may be of one mind with others."""
    return control.control if isinstance(control, Agreed) else control


class Follower:
    """The journal of a process that writes nothing: it keeps count of what process 0 writes.

    Attributes:
      done: indexes of the requests that have a record.
      failed: how many of these records are errors.
    """

    def __init__(self, done: Sequence[int], failed: int):
        self.done, self.failed = set(done), failed

    def append(self, record: Mapping[str, Any]) -> None:
        """Counts a record."""
        self.done.add(record["index"])
        self.failed += record.get("error") is not None

    def close(self) -> None:
        """Nothing is open."""


def open_journal(
    path: str, identity: Mapping[str, Any], pace: Mapping[str, Any], retry_failed: bool = False
) -> Journal | Follower:
    """The journal of a job, which process 0 writes and the others follow.

    Args:
      path: of the output.
      identity: what the text depends on, kept in the journal.
      pace: what else all processes must have in common.
      retry_failed: lets requests run again whose record is an error.

    Raises:
      ConfigError: processes have different inputs, models or settings, or process 0 cannot write the output.
    """
    hosts.check_same({**identity, **pace, "retry_failed": retry_failed})
    if not hosts.is_multiprocess():
        return Journal(path, identity, retry_failed)
    opened: list[Journal] = []

    def begin() -> dict[str, Any]:
        opened.append(Journal(path, identity, retry_failed))
        return {"done": sorted(opened[0].done), "failed": opened[0].failed}

    said = hosts.run_on_leader(begin)
    return opened[0] if opened else Follower(said["done"], said["failed"])
