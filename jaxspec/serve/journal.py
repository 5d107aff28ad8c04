"""The output of a batch job: append-only, locked, repaired after a crash, bound to one input and settings."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxspec.errors import ConfigError, JaxspecError

FORMAT = 1
STDOUT = "-"


class Entry(msgspec.Struct):
    """What is read back of a record."""

    index: int
    error: Any = None


class Journal:
    """Records of finished requests, one line each.

    A regular file is locked against other jobs, cut back to its last complete line, and resumed if it was
    begun with the same identity, which is kept next to it in ``<output>.job.json``. Pipes and ``-`` (standard
    output) are only written.

    Args:
      path: output file, or ``-``.
      identity: what the output depends on; nested JSON.

    Attributes:
      done: indexes of the requests that have a record.
      failed: how many of these records are errors.

    Raises:
      ConfigError: the file cannot be written, is being written, or belongs to another job.
    """

    def __init__(self, path: str, identity: Mapping[str, Any]):
        self.path, self.done, self.failed = path, set[int](), 0
        self._sidecar = Path(f"{path}.job.json")
        try:
            self._fd = os.dup(1) if path == STDOUT else os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another output") from error
        self.resumable = path != STDOUT and stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._size = 0
        try:
            if self.resumable:
                self._lock()
                self._bind({"format": FORMAT, **identity})
                self._recover()
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record, all of it or nothing.

        Raises:
          JaxspecError: the disk is full or the file cannot be written.
          BrokenPipeError: the reader of a pipe went away.
        """
        left = memoryview(msgspec.json.encode(record) + b"\n")
        size = len(left)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            self._cut_back()
            again = "; make room and run the same command again to go on" if self.resumable else ""
            records = f"after {len(self.done)} complete records"
            raise JaxspecError(f"{self.path}: cannot be written ({error.strerror}) {records}{again}") from error
        self._size += size
        self.done.add(record["index"])
        self.failed += record.get("error") is not None

    def close(self) -> None:
        """Hands everything to the disk and gives the lock back."""
        try:
            if self.resumable:
                os.fsync(self._fd)
        except OSError as error:
            raise JaxspecError(
                f"{self.path}: cannot be written ({error.strerror}); run the same command again"
            ) from error
        finally:
            os.close(self._fd)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.path}: another job is writing it; wait for its end or choose another output"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be locked ({error.strerror}); choose a file system with locks"
            ) from error

    def _bind(self, identity: dict[str, Any]) -> None:
        """Writes the identity of a fresh output, or compares that of one that was begun."""
        if os.fstat(self._fd).st_size == 0:
            part = self._sidecar.with_name(self._sidecar.name + ".part")
            try:
                part.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
                part.replace(self._sidecar)
            except OSError as error:
                part.unlink(missing_ok=True)
                raise ConfigError(f"{self._sidecar}: cannot be written ({error.strerror})") from error
            return
        advice = f"choose another output, or remove {self.path} and {self._sidecar.name} to start anew"
        try:
            begun = json.loads(self._sidecar.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path}: not empty, and not the output of a job; {advice}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._sidecar}: not readable ({error}); {advice}") from error
        was, now = _flat(begun), _flat(json.loads(json.dumps(identity)))
        changed = [
            f"{name} was {json.dumps(was.get(name))} and is {json.dumps(now.get(name))}"
            for name in sorted(was | now)
            if was.get(name) != now.get(name)
        ]
        if changed:
            advice = f"give what was given then to go on, {advice}"
            raise ConfigError(f"{self.path}: begun differently: {'; '.join(changed)}; {advice}")

    def _recover(self) -> None:
        """Reads which requests have a record, and cuts off a line that a crash left incomplete."""
        decoder = msgspec.json.Decoder(Entry)
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ConfigError(
                        f"{self.path}: line {number} is not a record of a job ({error}); remove it to go on"
                    ) from error
                if entry.index in self.done:
                    raise ConfigError(f"{self.path}: line {number} repeats index {entry.index}; remove that line")
                self._size += len(line)
                self.done.add(entry.index)
                self.failed += entry.error is not None
        self._cut_back()

    def _cut_back(self) -> None:
        """Leaves complete lines only; where that fails, too, the next start does it."""
        if self.resumable and os.fstat(self._fd).st_size != self._size:
            try:
                os.ftruncate(self._fd, self._size)
            except OSError:
                return


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings as one, names joined with dots."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{name}.{key}" if name else str(key)).items()}
