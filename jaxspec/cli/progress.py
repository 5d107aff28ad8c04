"""How far a job or a load is, on standard error: a bar on a terminal, for a job a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from jaxspec.serve.job import Progress

LINE_EVERY_S = 10.0


class ShownProgress:
    """Shows a job's progress while it is entered; call it with what the job reports."""

    def __init__(self):
        console = Console(stderr=True)
        self._bar: Bar | None = None
        if console.is_terminal:
            rates = TextColumn("{task.fields[rates]}")
            self._bar = Bar(BarColumn(), MofNCompleteColumn(), rates, TimeRemainingColumn(), console=console)
        self._task = None
        self._last: float | None = None

    def __enter__(self) -> "ShownProgress":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, p: "Progress") -> None:
        """Shows one state."""
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task("", total=p.total, rates="")
                self._bar.start()
            self._bar.update(self._task, completed=p.done, rates=rates(p))
        elif self._last is None:
            self._last = time.monotonic()
        elif time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            sys.stderr.write(f"jaxspec: {p.done}/{p.total} requests, {rates(p)}, {left(p)}\n")
            sys.stderr.flush()


@contextmanager
def shown_loading() -> Iterator[Callable[[int, int], None] | None]:
    """Gives what shows (bytes placed, bytes in all) of a loading model, None where no terminal is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    bar = Bar(*columns, console=console, transient=True)
    task = bar.add_task("", total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done == total:
            bar.stop()

    try:
        yield show
    finally:
        bar.stop()


def rates(p: "Progress") -> str:
    """Speed and acceptance, in words."""
    speed = p.tokens / p.time_s if p.time_s else 0.0
    failed = f", {p.failed} failed" if p.failed else ""
    return f"{speed:.0f} tokens/s, acceptance length {p.acceptance_length:.2f}{failed}"


def left(p: "Progress") -> str:
    """Time to go at the pace of this run, in words."""
    fresh = p.done - p.earlier
    if not fresh:
        return "time left unknown"
    seconds = round(p.time_s / fresh * (p.total - p.done))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"
