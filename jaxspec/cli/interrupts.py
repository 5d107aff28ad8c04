"""SIGINT and SIGTERM: they end a command within two seconds and with a message, whatever it is doing."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

GRACE_S, AGAIN_S, PATIENCE_S = 1.0, 0.05, 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SWALLOWING = ("_xla_gc_callback", "__del__")  # Python drops what is raised in them
SHOW_CURSOR = b"\x1b[?25h"  # a bar hides it


class Interrupted(KeyboardInterrupt):
    """A signal that asks the command to end.

    Attributes:
      number: of the signal.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Interrupts:
    """Ends this process where a signal cannot: Python's handlers wait for a call of XLA's compiler to return.

    The handlers raise ``Interrupted``, so that whatever can end in good order does. Beside them a thread learns of each
    signal at once. If the process is still there after ``GRACE_S``, the thread says what was interrupted and ends it.

    Attributes:
      doing: what the message says was interrupted.
      hint: what it says besides, such as how to go on.
      number: of the signal that came, 0 for none.
    """

    def __init__(self, leave: Callable[[int], Any] = os._exit):
        self.doing, self.hint, self.number = "starting", "", 0
        self._leave, self._told, self._dismissed = leave, threading.Lock(), False

    def watch(self) -> None:
        """Installs the handlers and the thread for the rest of this process; main thread only."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.arm()
        threading.Thread(target=self._wait, args=(read,), name="jaxspec-interrupts", daemon=True).start()

    def arm(self) -> None:
        """Installs the handlers, again where a library took them away; a signal that is ignored stays so."""
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                signal.signal(number, _raise)

    def dismiss(self) -> None:
        """Leaves signals to whoever installs handlers from here on."""
        self._dismissed = True

    def say(self, number: int) -> None:
        """Says once that the command was interrupted."""
        if self._told.acquire(blocking=False):
            signal_name = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
            hint = f"; {self.hint}" if self.hint else ""
            text = f"jaxspec: interrupted{signal_name} while {self.doing}{hint}\n".encode()
            if select.select([], [2], [], PATIENCE_S)[1]:  # a terminal may be stopped (Ctrl-S)
                os.write(2, b"\r" + SHOW_CURSOR + text if sys.stderr.isatty() else text)

    def _wait(self, read: int) -> None:
        while True:
            number = os.read(read, 1)[0]
            if self._dismissed or number not in SIGNALS or signal.getsignal(number) is not _raise:
                continue
            time.sleep(GRACE_S)
            self.say(number)
            self._leave(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    INTERRUPTS.number = number
    if frame is not None and frame.f_code.co_name in SWALLOWING:
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()
        return
    raise Interrupted(number)


INTERRUPTS = Interrupts()
