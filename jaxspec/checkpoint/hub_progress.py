"""Progress of downloads from the hub, for logs where no terminal shows the bars of the hub's client."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY_S = 30.0


@contextmanager
def log_progress(
    name: str, cache: Path, write: Callable[[str], object] | None = None, every_s: float = EVERY_S
) -> Iterator[None]:
    """Writes a line now and then while bytes of a repository arrive.

    Args:
      name: id of the repository.
      cache: where downloads lie.
      write: takes the lines; by default they go to standard error where that is no terminal, unless the client's
        progress bars are switched off.
      every_s: seconds between two lines.
    """
    write = write or _default()
    if write is None:
        yield
        return
    blobs, done = cache / f"models--{name.replace('/', '--')}" / "blobs", threading.Event()
    # Measured here: what arrives before the thread runs has arrived, too.
    watcher = threading.Thread(target=_watch, args=(name, blobs, _size_bytes(blobs), write, every_s, done), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _default() -> Callable[[str], object] | None:
    from huggingface_hub.utils import are_progress_bars_disabled

    return None if sys.stderr.isatty() or are_progress_bars_disabled() else sys.stderr.write


def _watch(
    name: str, blobs: Path, before: int, write: Callable[[str], object], every_s: float, done: threading.Event
) -> None:
    while not done.wait(every_s):
        now = _size_bytes(blobs)
        if now > before:
            write(f"jaxspec: downloading {name}, {now / 1e9:.2f} GB of it are here\n")
        before = now


def _size_bytes(blobs: Path) -> int:
    """Computes the bytes that are there, unfinished files included."""
    total = 0
    for file in blobs.glob("*"):
        try:
            total += file.stat().st_blocks * 512  # the client may reserve a file's whole length
        except OSError:  # it was renamed meanwhile
            continue
    return total
