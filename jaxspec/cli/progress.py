"""How far a job or a training is, on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
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


class ShownTraining:
    """Shows a training while it is entered; call it with what the loop reports."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._steps, self._bar = 0, None
        if console.is_terminal:
            figures = TextColumn("{task.fields[figures]}")
            self._bar = Bar(BarColumn(), MofNCompleteColumn(), figures, console=console)
            self._task = self._bar.add_task("", total=None, figures="compiling the update ...")

    def __enter__(self) -> "ShownTraining":
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, entry: Mapping[str, float]) -> None:
        """Shows one entry; held-out figures get a line of their own on a terminal too."""
        step = int(entry["step"])
        if "loss" not in entry:
            self._say(step, entry)
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures_of(entry, held_out=False))
        if self._bar is None or any("/" in name for name in entry):
            self._line(f"{step}/{self._steps} updates, {figures_of(entry)}")

    def _say(self, step: int, entry: Mapping[str, float]) -> None:
        """Says what takes long and is no figure."""
        if "compiled_s" in entry:
            self._line(f"the update is compiled, the first one took {_clock(entry['compiled_s'])}")
            now = ""
        elif "measuring" in entry:
            now = "measuring acceptance ..."
        else:
            self._steps = int(entry["steps"])
            if self._bar is not None:
                self._bar.update(self._task, total=self._steps)
                self._bar.start()
            if step:
                self._line(f"going on after update {step}")
            now = "compiling the update ..." if step < self._steps else ""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=now)
        elif now:
            self._line(f"{step}/{self._steps} updates, {now}" if "measuring" in entry else now)

    def _line(self, words: str) -> None:
        if self._bar is not None:
            self._bar.console.print(words, highlight=False, markup=False, soft_wrap=True)
        else:
            sys.stderr.write(f"jaxspec: {words}\n")
            sys.stderr.flush()


def figures_of(entry: Mapping[str, float], *, held_out: bool = True) -> str:
    """Puts one entry of a training's log into words."""
    words = [f"epoch {entry['epoch']:.3g}"] if "epoch" in entry else []
    words.append(f"loss {entry['loss']:.4g}")
    if "accuracy_0" in entry:
        words.append(f"first draft right {entry['accuracy_0']:.1%}")
    lengths = {name: value for name, value in entry.items() if name.endswith("/acceptance_length")}
    if held_out and lengths:
        words_of_lengths = ", ".join(
            f"{name.removesuffix('/acceptance_length')} {value:.2f}" for name, value in lengths.items()
        )
        words.append(f"tokens per pass {words_of_lengths}")
    if "learning_rate" in entry:
        words.append(f"learning rate {entry['learning_rate']:.3g}")
    if "tokens_per_s" in entry:
        words.append(f"{entry['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in entry:
        words.append(f"MFU {entry['mfu']:.1%}")
    if "time_s" in entry:
        words.append(f"{_clock(entry['time_s'])} elapsed")
    if "left_s" in entry:
        words.append(f"{_clock(entry['left_s'])} left")
    return ", ".join(words)


def rates(p: "Progress") -> str:
    """Puts speed and acceptance into words."""
    speed = p.tokens / p.time_s if p.time_s else 0.0
    failed = f", {p.failed} failed" if p.failed else ""
    return f"{speed:.0f} tokens/s, {acceptance_words(p.acceptance_length, p.drafted_length)}{failed}"


def acceptance_words(every: float, drafted: float) -> str:
    """Puts tokens per target pass into words, and those of the passes with drafts where they are others."""
    words = f"{every:.2f} tokens per pass"
    return words if f"{drafted:.2f}" == f"{every:.2f}" else f"{words} ({drafted:.2f} where drafted)"


def left(p: "Progress") -> str:
    """Puts the time to go, at the pace of this run, into words."""
    fresh = p.done - p.earlier
    if not fresh:
        return "time left unknown"
    return f"{_clock(p.time_s / fresh * (p.total - p.done))} left"


def _clock(time_s: float) -> str:
    """Returns hours, minutes and seconds."""
    seconds = round(time_s)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
