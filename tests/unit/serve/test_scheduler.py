"""Who waits after a step has failed."""

from types import SimpleNamespace
from typing import Any, cast

from jaxspec.serve.fair_queue import FairQueue
from jaxspec.serve.scheduler import Scheduler


def sample(arrived: float) -> Any:
    return SimpleNamespace(
        arrived=arrived,
        stalls=lambda: 1,
        pages=[],
        completion=SimpleNamespace(finish_reason=None),
        observed=0,
        caller=None,
    )


def test_after_a_failure_the_oldest_goes_first_and_before_all_that_waited():
    spec = cast(Any, SimpleNamespace(rows=3, pages=0, page=0))
    nothing = cast(Any, None)
    scheduler = Scheduler(nothing, spec, set(), nothing, allocate=nothing, slack=0, draft_length=0)
    waiting, oldest, middle, youngest = sample(4.0), sample(1.0), sample(2.0), sample(3.0)
    scheduler.waiting.extend([waiting])
    scheduler.rows[:] = [youngest, oldest, middle]
    scheduler.recover(MemoryError())
    assert [entry.arrived for entry in scheduler.waiting] == [1.0, 2.0, 3.0, 4.0]
    assert scheduler.rows == [None, None, None]


def named(caller: str, count: int) -> list[Any]:
    return [SimpleNamespace(caller=caller, name=f"{caller}{number}") for number in range(count)]


def order(queue: FairQueue) -> list[str]:
    return [cast(Any, one).name for one in queue]


def test_callers_take_turns():
    queue = FairQueue()
    queue.extend(named("a", 4))
    queue.extend(named("b", 2))
    assert order(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert cast(Any, queue.popleft()).name == "a0"
    queue.extend(named("c", 2))
    expected = ["b0", "a1", "c0", "b1", "a2", "c1", "a3"]
    assert order(queue) == expected, "who comes is the last of the round"
    back = named("back", 2)
    queue.put_back(back)
    assert (len(queue), cast(Any, queue[0]).name) == (9, "back0")
    assert order(queue.without({id(back[0])})) == ["back1", *expected]
    assert [cast(Any, queue.popleft()).name for _ in range(9)] == ["back0", "back1", *expected]
    assert (len(queue), list(queue), bool(queue)) == (0, [], False)


def test_a_caller_who_comes_all_the_time_waits_for_his_turn():
    queue, gone = FairQueue(), []
    queue.extend(named("many", 3))
    for number in range(6):
        queue.extend(named(f"new{number} ", 1))
        gone.append(cast(Any, queue.popleft()).caller)
    assert gone.count("many") == 3, gone
