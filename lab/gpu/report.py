"""What a section of the GPU suite found: rows of numbers, checks that passed or not, and what was left out and why."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Section:
    """One section while it runs.

    Attributes:
      name: of the section.
      tiny: whether it runs on tiny shapes in interpret mode, so that only the script itself is proved.
      budget_s: how long it may take.
      save: called with the record whenever a row or a check is added, so that a cut leaves what there is.
      tables: rows by table.
      checks: what had to hold, in order.
      skipped: what was left out.
    """

    name: str
    tiny: bool
    budget_s: float
    save: Callable[[dict[str, Any]], None]
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - (time.monotonic() - self.began)

    def add(self, table: str, **row: Any) -> None:
        """Adds a row of numbers to a table."""
        self.tables.setdefault(table, []).append({name: _rounded(value) for name, value in row.items()})
        self.save(self.record("running"))

    def check(self, name: str, *, passed: bool, detail: str) -> None:
        """Notes whether something held that had to hold."""
        self.checks.append({"name": name, "passed": bool(passed), "detail": detail})
        self.save(self.record("running"))

    def skip(self, name: str, reason: str) -> None:
        """Notes what was left out."""
        self.skipped.append({"name": name, "reason": reason})

    def has_time(self, name: str, needed_s: float = 0.0) -> bool:
        """Whether there is time for one more thing; notes it as skipped if not."""
        if self.left_s > needed_s:
            return True
        self.skip(name, f"no time: {max(self.left_s, 0.0):.0f} s of {self.budget_s:.0f} s left, needs {needed_s:.0f} s")
        return False

    @contextmanager
    def attempt(self, name: str, *, needed_s: float = 0.0) -> Iterator[bool]:
        """Yields whether there is time; an error inside becomes a failed check, and the section goes on."""
        if not self.has_time(name, needed_s):
            yield False
            return
        try:
            yield True
        except Exception as error:
            self.check(f"{name} runs", passed=False, detail=_message(error))

    def record(self, status: str, reason: str | None = None) -> dict[str, Any]:
        """The section as JSON."""
        return {
            "status": status,
            "reason": reason,
            "time_s": round(time.monotonic() - self.began, 2),
            "tables": self.tables,
            "checks": self.checks,
            "skipped": self.skipped,
        }


def run_section(section: Section, function: Callable[[Section], None]) -> dict[str, Any]:
    """Runs a section to its end; an error ends it and is recorded."""
    try:
        function(section)
    except Exception as error:
        return section.record("failed", _message(error))
    return section.record("done")


def empty_record(status: str, reason: str) -> dict[str, Any]:
    """The record of a section that never ran."""
    return {"status": status, "reason": reason, "time_s": 0.0, "tables": {}, "checks": [], "skipped": []}


def _message(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {place.name}, line {place.lineno}: {str(error)[:600]}"


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
