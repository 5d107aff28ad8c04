"""The journal of a job that several processes run: process 0 writes it, the others follow."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.serve.journal import Journal
from jaxspec.sharding import hosts


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
    path: str, identity: Mapping[str, Any], pace: Mapping[str, Any], *, retry_failed: bool = False
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
        return Journal(path, identity, retry_failed=retry_failed)
    opened: list[Journal] = []

    def begin() -> dict[str, Any]:
        opened.append(Journal(path, identity, retry_failed=retry_failed))
        return {"done": sorted(opened[0].done), "failed": opened[0].failed}

    said = hosts.run_on_leader(begin)
    return opened[0] if opened else Follower(said["done"], said["failed"])
