"""Who waits after a step has failed."""

from types import SimpleNamespace
from typing import Any, cast

from jaxspec.serve.scheduler import Scheduler


def sample(arrived: float) -> Any:
    return SimpleNamespace(
        arrived=arrived, stalls=lambda: 1, pages=[], completion=SimpleNamespace(finish_reason=None), observed=0
    )


def test_after_a_failure_the_oldest_goes_first_and_before_all_that_waited():
    spec = cast(Any, SimpleNamespace(rows=3, pages=0, page=0))
    nothing = cast(Any, None)
    scheduler = Scheduler(nothing, spec, set(), nothing, allocate=nothing, slack=0, draft_length=0)
    waiting, oldest, middle, youngest = sample(4.0), sample(1.0), sample(2.0), sample(3.0)
    scheduler.waiting.append(waiting)
    scheduler.rows[:] = [youngest, oldest, middle]
    scheduler.recover(MemoryError())
    assert [entry.arrived for entry in scheduler.waiting] == [1.0, 2.0, 3.0, 4.0]
    assert scheduler.rows == [None, None, None]
