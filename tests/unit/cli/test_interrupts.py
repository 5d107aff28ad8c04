"""SIGINT and SIGTERM end a command within two seconds, with a message and the right status, whatever it is doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxspec.cli import interrupts
from jaxspec.cli.interrupts import Interrupted, Interrupts
from scripts.house_report import ROOT
from tests.unit.serve.tiny_model import write_tiny_model

MOST_S = 2.0
# Returns neither before it is done nor for a signal, as a call of XLA's compiler does.
BLOCKED = """
import hashlib, sys
from jaxspec.cli import main as command
def blocked(args):
    command.INTERRUPTS.doing, command.INTERRUPTS.hint = "compiling 3 of 9 programs", "the same command goes on"
    sys.stderr.write("begun\\n")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
command._run = blocked
sys.exit(command.main())
"""
ENDING = """
import sys, time
from jaxspec.cli import main as command
def blocked(args):
    try:
        sys.stderr.write("begun\\n")
        time.sleep(60)
    finally:
        sys.stderr.write("in good order\\n")
command._run = blocked
sys.exit(command.main())
"""
IGNORING = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + ENDING.replace("sleep(60)", "sleep(0.5)")


def interrupt(program: list[str], begun: str, number: int, **settings: object) -> tuple[int, str, float]:
    """Status, standard error and how long it took to end, of a program that is sent a signal once it has begun."""
    # A shell's background jobs ignore SIGINT, and hand that down.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            program, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, **settings
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    said = ""
    while begun not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(number)
    began = time.monotonic()
    said += process.communicate(timeout=60)[1]
    return process.returncode, said, time.monotonic() - began


@pytest.mark.parametrize(("number", "by"), [(signal.SIGINT, ""), (signal.SIGTERM, " by SIGTERM")])
def test_a_call_that_blocks_is_ended(number: int, by: str):
    status, said, time_s = interrupt([sys.executable, "-c", BLOCKED], "begun", number)
    assert status == 128 + number
    assert said == f"begun\njaxspec: interrupted{by} while compiling 3 of 9 programs; the same command goes on\n"
    assert time_s < MOST_S


def test_what_can_end_in_good_order_does():
    status, said, time_s = interrupt([sys.executable, "-c", ENDING], "begun", signal.SIGTERM)
    assert status == 143
    assert said == "begun\nin good order\njaxspec: interrupted by SIGTERM while starting\n"
    assert time_s < MOST_S


def test_a_signal_that_the_parent_ignores_stays_ignored():
    status, said, _ = interrupt([sys.executable, "-c", IGNORING], "begun", signal.SIGINT)
    assert status == 0
    assert said == "begun\nin good order\n"


def test_where_python_drops_exceptions_the_signal_comes_again(monkeypatch: pytest.MonkeyPatch):
    again: list[tuple[int, int]] = []
    monkeypatch.setattr(interrupts.os, "kill", lambda *sent: again.append(sent))
    monkeypatch.setattr(interrupts.threading, "Timer", lambda after_s, function, sent: _Now(function, sent))

    def __del__() -> None:
        interrupts._raise(signal.SIGINT, sys._getframe())

    __del__()
    assert again == [(os.getpid(), signal.SIGINT)]
    with pytest.raises(Interrupted):
        interrupts._raise(signal.SIGINT, sys._getframe())


class _Now:
    """A timer that does not wait."""

    def __init__(self, function, sent):
        self.start = lambda: function(*sent)


def test_it_is_said_once(capfd: pytest.CaptureFixture[str]):
    told = Interrupts()
    for _ in range(2):
        told.say(signal.SIGINT)
    assert capfd.readouterr().err == "jaxspec: interrupted while starting\n"


@pytest.mark.slow
def test_compiling_is_interrupted(tmp_path: Path):
    pytest.importorskip("ml_dtypes")  # numpy knows bfloat16 then
    model = write_tiny_model(tmp_path / "model")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_token_ids": [1, 2]}\n')
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxspec", "generate", "--model", str(model), "--max-model-len", "64"]
    command += ["--input", str(source), "--output", str(target)]
    status, said, time_s = interrupt(command, "compiling", signal.SIGINT, env=environment)
    assert status == 130
    assert "jaxspec: interrupted while compiling" in said
    assert said.splitlines()[-1].endswith("; no request is lost, the same command goes on")
    assert "Traceback" not in said
    assert not target.exists() or target.read_text() == ""
    assert time_s < MOST_S
