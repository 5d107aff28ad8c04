"""How far loading and compiling are, on standard error: a bar on a terminal, lines elsewhere; silence never."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from jaxspec.cli.interrupts import INTERRUPTS

LINE_EVERY_S = 10.0
COMPILING = "compiling"
IN_BYTES = ("loading", "downloading")


class Stages:
    """Shows stages that come one after the other; call it with what ``LLM(on_progress=)`` reports.

    On a terminal a bar moves; elsewhere a line begins each stage, one follows every ten seconds, though nothing is
    reported, and one says how long the stage took.
    """

    def __init__(self, every_s: float = LINE_EVERY_S):
        # Not rich's own guess, which the environment (FORCE_COLOR) can turn: a bar in a file is no use.
        self._live, self._every_s = sys.stderr.isatty(), every_s
        self._console = Console(stderr=True, force_terminal=self._live)
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._stage, self._counts, self._began = "", (0, 0), 0.0
        self._bar: Bar | None = None
        self._around = INTERRUPTS.doing  # what a signal interrupts between stages

    def __enter__(self) -> "Stages":
        self._around = INTERRUPTS.doing
        if not self._live:
            threading.Thread(target=self._remind, daemon=True).start()
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._ended.set()
        with self._lock:
            self._end(well=kind is None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows one state; a total of 0 says that nobody knows how far it is."""
        with self._lock:
            begins = stage != self._stage
            if begins:
                self._end()
                self._stage, self._began = stage, time.monotonic()
            self._counts = done, total
            INTERRUPTS.doing = in_words(self._stage, *self._counts)
            if self._live:
                self._draw()
            elif begins:
                _say(f"{in_words(self._stage, *self._counts)}")
            if total and done == total:
                self._end()

    def _draw(self) -> None:
        """Moves the bar of a stage."""
        if self._bar is None:
            columns = TextColumn("jaxspec: {task.description}"), BarColumn(30), TextColumn("{task.fields[words]}")
            self._bar = Bar(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._bar.add_task(self._stage, total=None, words="")
            self._bar.start()
        done, total = self._counts
        words = amounts(self._stage, done, total)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total or None, words=words)

    def _remind(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:
                if self._stage and not self._ended.is_set():
                    _say(f"{in_words(self._stage, *self._counts)}, {time.monotonic() - self._began:.0f} s")

    def _end(self, *, well: bool = True) -> None:
        """Takes the bar away, and says what a stage took that ended well."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._stage and well:
            _, total = self._counts
            words = amounts(self._stage, total, total)
            what = f"{self._stage}: {words}" if words else self._stage
            _say(f"{what} in {time.monotonic() - self._began:.1f} s")
        self._stage = ""
        if well:
            INTERRUPTS.doing = self._around


def _say(text: str) -> None:
    sys.stderr.write(f"jaxspec: {text}\n")
    sys.stderr.flush()


def in_words(stage: str, done: int, total: int) -> str:
    """Puts a stage and how far it is into words: ``compiling 3 of 9 programs``."""
    return f"{stage} {amounts(stage, done, total)}".strip()


def amounts(stage: str, done: int, total: int) -> str:
    """Returns how much of how much is done, empty where that is unknown."""
    if not total or stage not in (COMPILING, *IN_BYTES):
        return ""
    if stage == COMPILING:
        return f"{total} programs" if done == total else f"{done} of {total} programs"
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{total / unit:.1f} {name}" if done == total else f"{done / unit:.1f} of {total / unit:.1f} {name}"


@contextmanager
def shown_stages(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """Gives what shows (stage, done, total); None where nothing is to be shown."""
    if quiet:
        yield None
        return
    with Stages() as stages:
        yield stages
