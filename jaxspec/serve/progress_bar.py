"""A progress bar on the terminal while a caller waits for many requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxspec.errors import RequestError
from jaxspec.serve.request import RequestOutput

MakeBar = Callable[..., Any]
TITLE = "Processed prompts"
PATIENCE_S = 1.0  # before a bar appears


@contextmanager
def show_progress(
    outputs: Sequence[RequestOutput], *, wanted: bool | MakeBar | None
) -> Iterator[Callable[[], None] | None]:
    """Yields a function to call while requests run, None where no bar is wanted.

    Args:
      outputs: their outputs.
      wanted: True for a bar on a terminal where there are several; a function like ``tqdm.tqdm`` makes another bar.

    Raises:
      RequestError: it is neither.
    """
    if not isinstance(wanted, bool | None) and not callable(wanted):
        raise RequestError(f"use_tqdm: True, False or a function such as tqdm.tqdm is needed, got {wanted!r}")
    if not wanted or (wanted is True and (len(outputs) < 2 or not sys.stderr.isatty())):
        yield None
        return
    bar = _Bar(len(outputs)) if wanted is True else wanted(total=len(outputs), desc=TITLE)
    shown = 0

    def update() -> None:
        nonlocal shown
        done = sum(output.finished for output in outputs)
        bar.update(done - shown)
        shown = done

    try:
        yield update
        update()
    finally:
        bar.close()


class _Bar:
    """Has the methods of tqdm's bar; it draws in the caller's thread, for a drawing thread's lock might stay held."""

    def __init__(self, total: int):
        self._bar = Progress(
            TextColumn(TITLE), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), auto_refresh=False,
        )  # fmt: skip
        self._task, self._began, self._open = self._bar.add_task("", total=total, rate=""), time.monotonic(), False

    def update(self, more: int) -> None:
        spent_s = time.monotonic() - self._began
        self._bar.update(self._task, advance=more)
        if spent_s < PATIENCE_S:
            return
        if not self._open:
            self._open = True
            self._bar.start()
        self._bar.update(self._task, rate=f"{self._bar.tasks[0].completed / spent_s:.2f} requests/s")
        self._bar.refresh()

    def close(self) -> None:
        if self._open:
            self._bar.stop()
