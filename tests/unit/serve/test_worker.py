"""The thread that works on an engine: order, exceptions, interrupts, forks, and how it ends."""

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from jaxspec.errors import JaxspecError
from jaxspec.serve.worker import Job, Worker


class Interrupt(BaseException):
    """What the signal handler of these tests raises."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def wait_for(true: Any) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_work_is_done_in_order_by_one_thread():
    worker, seen = Worker(), []

    def note(number: int) -> int:
        seen.append((number, threading.get_ident()))
        return number

    jobs = [worker.post(lambda n=n: note(n)) for n in range(50)]
    assert [worker.wait(job) for job in jobs] == list(range(50))
    assert [number for number, _ in seen] == list(range(50))
    assert {ident for _, ident in seen} != {threading.get_ident()}
    assert len({ident for _, ident in seen}) == 1


def test_threads_that_come_at_once_start_one():
    worker, idents = Worker(), queue.SimpleQueue()
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        for _ in range(50):
            idents.put(worker.call(threading.get_ident))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({idents.get() for _ in range(400)}) == 1


def test_an_exception_comes_back_with_its_traceback():
    def fail() -> None:
        raise ValueError("on purpose")

    worker = Worker()
    with pytest.raises(ValueError, match="on purpose") as caught:
        worker.call(fail)
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert worker.call(lambda: 5) == 5


def test_work_asked_for_by_work_is_done_at_once():
    worker = Worker()
    assert worker.call(lambda: worker.call(lambda: worker.call(lambda: 7))) == 7


def test_iterators_take_turns():
    worker, seen, go = Worker(), [], queue.SimpleQueue()

    def steps(name: str) -> Iterator[None]:
        for number in range(3):
            seen.append(f"{name}{number}")
            yield
        return name

    worker.post(go.get)  # until both wait
    jobs = [worker.post(lambda name=name: steps(name)) for name in "ab"]
    go.put(None)
    assert [worker.wait(job) for job in jobs] == ["a", "b"]
    assert seen == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_someone_looks_while_they_wait():
    worker, looks = Worker(), []

    def until_seen() -> Iterator[None]:
        while len(looks) < 3:
            yield
        return "seen"

    assert worker.call(until_seen, look=lambda: looks.append(1), every_s=0.001) == "seen"


@pytest.mark.usefixtures("alarm")
def test_interrupts_reach_the_caller_and_never_the_work():
    worker, done, reached = Worker(), [0], 0

    def work() -> None:
        before = done[0]
        for _ in range(20):
            time.sleep(0)
        done[0] = before + 1  # what an interrupt in between would lose

    for round_ in range(200):
        job = Job(lambda: done.append(1))
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + (round_ % 50) * 4e-5)
            for _ in range(20):
                worker.call(work)
            time.sleep(1)
        except Interrupt:
            worker.put_now(job)
            reached += 1
    assert reached == 200
    posted = worker.call(lambda: done[0])
    assert worker.call(lambda: len(done)) == 201, "each handler's job was done"
    worker.call(work)
    assert worker.call(lambda: done[0]) == posted + 1


def test_it_ends_with_whoever_holds_it():
    worker = Worker()
    ident = worker.call(threading.get_ident)

    class Held:
        pass

    held = Held()
    ref = weakref.ref(held)
    worker.call(lambda held=held: id(held))
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda held=held: 1 / 0 if held else None)
    del held
    gc.collect()
    assert ref() is None, "the thread holds nothing of work that is done"
    assert ident in sys._current_frames()
    del worker
    wait_for(lambda: ident not in sys._current_frames())


# JAX warns of every fork once it runs.
@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_fork_is_told():
    worker = Worker()
    worker.call(int)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            worker.call(int)
        except JaxspecError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"forked" in os.read(read, 1000)
    os.close(read)


ENDS = """
import threading, time
from jaxspec.serve.worker import Worker
worker = Worker()
assert worker.call(lambda: 1) == 1
def steps():
    while True:
        time.sleep(0.001)
        yield
def wait():
    worker.call(steps)
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.05)
print("end")
"""


def test_the_interpreter_ends_while_work_runs():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


FORKS = """
import os, sys
from jaxspec.serve.worker import Worker
worker = Worker()
worker.call(int)
if os.fork() == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]), worker.call(int))
"""


def test_a_fork_ends_like_any_process():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (0, "3 0\n"), done.stderr


def test_a_call_is_cheap():
    worker, each = Worker(), []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            worker.call(int)
        each.append((time.perf_counter() - began) / 100)
    assert min(each) < 100e-6, [f"{1e6 * s:.0f} us" for s in each]


def test_work_that_is_left_at_the_end_is_let_go_before_the_thread_has_ended():
    """What it holds may be weights, which the interpreter's end would take away under the thread."""
    worker, began, release, before = Worker(), threading.Event(), threading.Event(), []
    shared = worker._shared

    class Held:
        def __del__(self):
            before.append(shared.ended.empty())

    worker.post(lambda: (began.set(), release.wait(10)))
    assert began.wait(10)
    worker.post(Held().__repr__)
    shared.closing.append(True)
    release.set()
    while shared.ended.empty():
        time.sleep(0.01)
    for _ in range(500):
        if before:
            break
        time.sleep(0.01)
    assert before == [True]
