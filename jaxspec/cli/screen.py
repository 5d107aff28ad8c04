"""What commands print for people: styled on a terminal, plain lines without escape codes when piped."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text as Styled

from jaxspec.cli.stages import Stages, in_words

UNITS = ("B", "kB", "MB", "GB", "TB")


class Screen:
    """Standard output; no escape codes when piped, when told so, or under ``NO_COLOR``."""

    def __init__(self, *, color: bool):
        self.live = sys.stdout.isatty()
        color = color and self.live and not os.environ.get("NO_COLOR")
        self.color = color
        width = None if self.live else 100
        self.console = Console(
            color_system="auto" if color else None,
            force_terminal=color,
            highlight=False,
            markup=False,
            width=width,
        )

    def line(self, text: str = "", style: str = "") -> None:
        """Prints one line."""
        self.console.print(Styled(text, style), soft_wrap=True)

    def piece(self, text: str, style: str = "") -> None:
        """Prints text without a line end, at once."""
        self.console.print(Styled(text, style), end="", soft_wrap=True)
        self.console.file.flush()

    @contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str, int, int], None]]:
        """Says what is waited for, then how long it took; yields what shows (stage, done, total) meanwhile."""
        began = time.monotonic()
        if self.color:
            with self.console.status(Styled(f"{text} ...", "dim")) as status:
                yield lambda stage, *counts: status.update(Styled(f"{text}: {in_words(stage, *counts)} ...", "dim"))
            self.piece(f"{text} ... ", "dim")
        else:
            self.line(f"{text} ...", "dim")  # a whole line: stages write theirs to standard error
            with Stages() as stages:
                yield stages
        self.line(f"{time.monotonic() - began:.1f} s", "dim")

    @contextmanager
    def counting(self, text: str) -> Iterator[Callable[[int, int], None]]:
        """Yields a function (done, total) that shows progress on a terminal, and nothing elsewhere."""
        if not self.color:
            self.line(f"{text} ...")
            yield lambda done, total: None
            return
        # Rarely drawn: it would take time from what is measured.
        with self.console.status(Styled(text, "dim"), refresh_per_second=1) as status:
            yield lambda done, total: status.update(Styled(f"{text}: run {done} of {total}", "dim"))


def amount(size_bytes: float) -> str:
    """Returns bytes in the largest unit that leaves at least 1: ``35.1 kB``."""
    size, unit = float(size_bytes), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if unit == 0 else f"{size:.3g} {UNITS[unit]}"
