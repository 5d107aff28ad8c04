"""A file of records, one line each: appended whole, cut back to complete lines after a crash."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxspec.errors import ConfigError, JaxspecError


class Entry(msgspec.Struct):
    """The part of a record that is read back."""

    index: int
    error: Any = None


class Records:
    """An open file of records, or a pipe, which is not ``resumable``; it owns its file descriptor."""

    def __init__(self, path: str, fd: int):
        self.path, self.fd = path, fd
        self.resumable = stat.S_ISREG(os.fstat(fd).st_mode)
        self._size = 0

    @classmethod
    def open(cls, path: str) -> Records:
        """Opens a file, which is made if there is none; raises ConfigError if it cannot be written."""
        try:
            return cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another output") from error

    def lines(self) -> Iterator[tuple[Entry, bytes]]:
        """Yields the complete lines, and cuts off an incomplete one; raises ConfigError if one is not a record."""
        decoder, self._size = msgspec.json.Decoder(Entry), 0
        with open(self.fd, "rb", closefd=False) as file:
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
                self._size += len(line)
                yield entry, line
        self._cut_back()

    def indexes(self) -> tuple[set[int], set[int]]:
        """Returns the indexes that have a record, and those of them whose record is an error.

        Raises ConfigError if a line is not a record, or repeats an index.
        """
        done, failed = set[int](), set[int]()
        for number, (entry, _) in enumerate(self.lines(), 1):
            if entry.index in done:
                raise ConfigError(f"{self.path}: line {number} repeats index {entry.index}; remove that line")
            done.add(entry.index)
            if entry.error is not None:
                failed.add(entry.index)
        return done, failed

    def append(self, data: bytes, advice: str) -> None:
        """Writes one line, all of it or nothing; ``advice`` ends the message of an error.

        Raises:
          JaxspecError: the disk is full or the file cannot be written.
          BrokenPipeError: the reader of a pipe went away.
        """
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self.fd, left) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            self._cut_back()
            raise JaxspecError(f"{self.path}: cannot be written ({error.strerror}) {advice}") from error
        self._size += len(data)

    def sync(self) -> None:
        """Hands everything to the disk; raises JaxspecError if it does not take it."""
        try:
            if self.resumable:
                os.fsync(self.fd)
        except OSError as error:
            raise JaxspecError(
                f"{self.path}: cannot be written ({error.strerror}); run the same command again"
            ) from error

    def close(self) -> None:
        """Closes the file, which releases its lock."""
        os.close(self.fd)

    def _cut_back(self) -> None:
        """Leaves complete lines only; where that fails, too, the next start does it."""
        if self.resumable and os.fstat(self.fd).st_size != self._size:
            try:
                os.ftruncate(self.fd, self._size)
            except OSError:
                return
