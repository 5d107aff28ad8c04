"""The output of a batch job: append-only, locked, repaired after a crash, bound to one input and settings."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from jaxspec.config import differences
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.serve.records import Records
from jaxspec.whole_file import write_whole

FORMAT = 1
STDOUT = "-"
SIDECAR, AGAIN, PART = ".job.json", ".retry", ".part"


class Journal:
    """Records of finished requests, one line each.

    A regular file is locked against other jobs, cut back to its last complete line, and resumed if it was
    begun with the same identity, which is kept next to it in ``<output>.job.json``. Pipes and ``-`` (standard
    output) are only written.

    Requests that failed can run again. Their new records are kept in ``<output>.retry`` until the job is closed, which
    puts each in the place of its error by writing the output anew and renaming it: at any moment the output has one
    record per request, and a job that was killed does so when it is opened next.

    Args:
      path: output file, or ``-``.
      identity: what the output depends on; nested JSON.
      retry_failed: lets requests run again whose record is an error.

    Attributes:
      done: indexes of the requests that have a record and do not run again.
      failed: how many of these records are errors.

    Raises:
      ConfigError: the file cannot be written, is being written, or belongs to another job.
    """

    def __init__(self, path: str, identity: Mapping[str, Any], *, retry_failed: bool = False):
        self.path, self.done, self.failed = path, set[int](), 0
        self._sidecar = Path(f"{path}{SIDECAR}")
        self._main = Records(path, os.dup(1)) if path == STDOUT else Records.open(path)
        self._again: Records | None = None
        self._retried: frozenset[int] = frozenset()
        self.resumable = path != STDOUT and self._main.resumable
        try:
            if self.resumable:
                self._lock(self._main.fd)
                self._bind({"format": FORMAT, **identity})
                self._resume(retry_failed=retry_failed)
        except BaseException:
            self._release()
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record, all of it or nothing; raises as ``Records.append`` does."""
        again = "; make room and run the same command again to go on" if self.resumable else ""
        file = self._again if self._again is not None and record["index"] in self._retried else self._main
        file.append(msgspec.json.encode(record) + b"\n", f"after {len(self.done)} complete records{again}")
        self.done.add(record["index"])
        self.failed += record.get("error") is not None

    def close(self) -> None:
        """Hands everything to the disk, new records of retried requests in their place, and releases the lock.

        Raises JaxspecError if the disk does not take it; the same command does it later.
        """
        try:
            if self.resumable:
                self._main.sync()
                self._replace()
        finally:
            self._release()

    def _release(self) -> None:
        for file in (self._main, self._again):
            if file is not None:
                file.close()
        self._again = None

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(fd), os.stat(self.path)):
                raise BlockingIOError  # a job has put another file in its place since this one was opened
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
        if os.fstat(self._main.fd).st_size == 0:
            self._begin(identity)
            return
        advice = f"choose another output, or remove {self.path} and {self._sidecar.name} to start anew"
        try:
            begun = json.loads(self._sidecar.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path}: not empty, and not the output of a job; {advice}") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._sidecar}: not readable ({error}); {advice}") from error
        if changed := differences(begun, json.loads(json.dumps(identity)), json.dumps):
            advice = f"give what was given then to go on, {advice}"
            raise ConfigError(f"{self.path}: begun differently: {'; '.join(changed)}; {advice}")

    def _begin(self, identity: dict[str, Any]) -> None:
        """Writes the identity, also over that of an earlier output of this name that was removed."""
        if self._sidecar.exists() and not _is_identity(self._sidecar):
            raise ConfigError(f"{self._sidecar}: is there and not of a job; remove it or choose another output")
        again = Path(f"{self.path}{AGAIN}")
        try:
            write_whole(self._sidecar, json.dumps(identity, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"{self._sidecar}: cannot be written ({error.strerror})") from error
        if again.exists():
            stale = Records.open(str(again))
            try:
                stale.indexes()  # raises where it holds something else than a job's records
                again.unlink()
            finally:
                stale.close()

    def _resume(self, *, retry_failed: bool) -> None:
        """Reads which requests have a record, once those of an earlier retry are in their place."""
        if os.path.exists(f"{self.path}{AGAIN}"):
            self._again = Records.open(f"{self.path}{AGAIN}")
            self._again.indexes()
            self._replace()
        done, failed = self._main.indexes()
        if retry_failed and failed:
            self._again, self._retried = Records.open(f"{self.path}{AGAIN}"), frozenset(failed)
            self._again.indexes()
        self.done, self.failed = done - self._retried, len(failed - self._retried)

    def _replace(self) -> None:
        """Puts the records of requests that ran again into the places of their errors, all at once or not at all."""
        if self._again is None:
            return
        try:
            self._put_in_place(self._again)
        except OSError as error:
            raise JaxspecError(
                f"{self.path}: the records of {self.path}{AGAIN} cannot be put into their places ({error.strerror}); "
                "make room and run the same command again"
            ) from error
        self._again = None

    def _put_in_place(self, again: Records) -> None:
        name = os.path.realpath(self.path)
        places, offset = dict[int, tuple[int, int]](), 0
        for entry, line in again.lines():
            places[entry.index] = (len(line), offset)
            offset += len(line)
        if places:
            again.sync()
            rewritten, before = self._rewritten(name, again, places), self._main
            self._main = rewritten
            before.close()
            _sync_folder(name)
        os.unlink(f"{self.path}{AGAIN}")
        again.close()

    def _rewritten(self, name: str, again: Records, places: Mapping[int, tuple[int, int]]) -> Records:
        """Writes the output anew, locked, with new records in the places of errors; unchanged if that fails."""
        path = f"{name}{AGAIN}{PART}"
        advice = f"with the records of {self.path}{AGAIN}; make room and run the same command again"
        part = Records(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666))
        try:
            os.fchmod(part.fd, os.fstat(self._main.fd).st_mode & 0o7777)
            fcntl.flock(part.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for entry, line in self._main.lines():
                replaced = entry.error is not None and entry.index in places
                part.append(os.pread(again.fd, *places[entry.index]) if replaced else line, advice)
            part.sync()
            os.replace(path, name)
        except BaseException:
            part.close()
            os.unlink(path)
            raise
        part.path = self.path
        return part


def files_of(path: str) -> list[str]:
    """Returns the names of all files that a journal may write."""
    return [path, f"{path}{SIDECAR}", f"{path}{AGAIN}", f"{os.path.realpath(path)}{AGAIN}{PART}"]


def _is_identity(sidecar: Path) -> bool:
    try:
        value = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(value, dict) and "format" in value


def _sync_folder(name: str) -> None:
    """Makes a rename durable."""
    fd = os.open(os.path.dirname(name), os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
