"""Programs compile on threads: the first first, each error where its program is wanted, nothing after the end."""

import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from jaxspec.errors import JaxspecError
from jaxspec.serve import background
from jaxspec.serve.background import THREADS, CompiledPrograms


def test_programs_come_in_order_and_are_waited_for_by_name():
    began, gate = [], threading.Event()

    def job(name: str, *, waits: bool = False):
        def compile_one() -> str:
            began.append(name)
            if waits:
                assert gate.wait(30)
            return name.upper()

        return compile_one

    names = [f"p{i}" for i in range(6)]
    table = CompiledPrograms({name: job(name, waits=name == "p3") for name in names})
    shown = []
    table.wait(["p0", "p1", "p2", "not there"], lambda *how: shown.append(how))
    assert (shown[0], shown[-1]) == ((0, 3), (3, 3))
    assert [done for done, _ in shown] == sorted({done for done, _ in shown})
    table.wait(["p5"])
    assert not table.complete
    assert not table.ready("p3")
    ended = []
    table.then(lambda: ended.append(True))
    gate.set()
    assert table["p3"] == "P3"
    table.wait(names)
    assert table.complete
    for _ in range(1000):
        if ended:
            break
        time.sleep(0.01)
    assert ended == [True]
    table.then(lambda: ended.append(False))
    assert ended == [True, False], "at once where nothing is left"
    assert began[:2] == names[:2]
    assert sorted(began) == names
    assert {**table} == {name: name.upper() for name in names}


def test_more_can_be_compiled_later():
    table = CompiledPrograms({"first": lambda: 1})
    table.wait(["first"])
    table.compile({"later": lambda: 2, "last": lambda: 3})
    assert len(table) == 3
    table.wait(table)
    assert {**table} == {"first": 1, "later": 2, "last": 3}


def test_an_error_is_raised_where_its_program_is_wanted():
    def fail() -> None:
        raise MemoryError("no room to compile")

    table = CompiledPrograms({"good": lambda: 1, "bad": fail})
    table.wait(["good"])
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            table["bad"]
    with pytest.raises(MemoryError):
        table.wait(["bad"])
    assert table.ready("bad")
    table["bad"], table["rare"] = 2, 3
    assert (table["good"], table["bad"], table["rare"]) == (1, 2, 3)
    with pytest.raises(KeyError):
        table["unknown"]
    assert "unknown" not in table


def test_what_nobody_holds_any_more_is_not_compiled():
    gate, began = threading.Event(), []

    def job() -> None:
        began.append(1)
        assert gate.wait(30)

    table = CompiledPrograms(dict.fromkeys(range(10), job))
    while len(began) < THREADS:
        time.sleep(0.01)
    shared, gone = table._shared, weakref.ref(table)
    del table
    assert gone() is None, "the threads do not hold it"
    gate.set()
    while shared.running:
        time.sleep(0.01)
    assert len(began) == THREADS
    closed = CompiledPrograms({i: lambda: time.sleep(0.1) for i in range(10)})
    closed.close()
    with pytest.raises(JaxspecError, match="given up"):
        closed[9]


SCRIPT = """
import sys
import time
from jaxspec.serve.background import CompiledPrograms
def job():
    time.sleep(1)
    sys.stdout.write("compiled\\n")  # one write: print makes two, and threads mix them
    sys.stdout.flush()
table = CompiledPrograms({i: job for i in range(50)})
time.sleep(0.2)
print("ends", flush=True)
"""


def test_the_interpreter_waits_for_what_compiles_and_begins_nothing_more():
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split() == ["ends", *["compiled"] * THREADS]
    assert time.monotonic() - began < 30


def test_the_exit_waits_for_what_follows_the_last_compilation():
    began, release, closed = threading.Event(), threading.Event(), threading.Event()
    compiled = threading.Event()
    programs = CompiledPrograms({"a": lambda: compiled.wait(10)})
    programs.then(lambda: (began.set(), release.wait(10)))
    compiled.set()
    assert began.wait(10)

    def close() -> None:
        background._close(programs._shared, os.getpid())
        closed.set()

    threading.Thread(target=close).start()
    assert not closed.wait(0.2)
    release.set()
    assert closed.wait(10)
