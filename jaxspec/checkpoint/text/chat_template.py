"""A model's chat template: what it reads, and the text that it writes within bounds of time and memory."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from jaxspec.checkpoint.text.template_worker import MEMORY_BYTES, TIME_S
from jaxspec.errors import RequestError

WORKER = Path(__file__).with_name("template_worker.py")
PATIENCE_S = 10.0


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and what it reads.

    Attributes:
      source: text of the template.
      reads: names of the variables that it looks at.
      parts: whether it goes through the parts of a content.
      tells_strings: whether it tells a content that is a string from one of parts.
    """

    source: str
    reads: frozenset[str]
    parts: bool
    tells_strings: bool

    @classmethod
    def of(cls, source: str) -> ChatTemplate:
        """Reads a template.

        Raises:
          RequestError: it is not one.
        """
        return _described(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Writes the text of a conversation.

        Raises:
          RequestError: the template refuses them, or takes too much time or memory.
        """
        return _WORKER.ask({"template": self.source, "variables": dict(variables)})["text"]


@lru_cache(maxsize=64)
def _described(source: str) -> ChatTemplate:
    answer = _WORKER.ask({"template": source})
    return ChatTemplate(source, frozenset(answer["reads"]), answer["parts"], answer["tells_strings"])


class _Worker:
    """The process that runs templates, started when it is needed and again after it was ended."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._answers: IO[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the process's answer to a request; safe from any thread."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages: a chat template takes JSON values ({error})") from error
        with self._lock:
            try:
                answer = self._exchange(line)
            except BaseException:
                self.end()
                raise
        if "error" in answer:
            raise RequestError(f"messages: the chat template refuses them ({' '.join(answer['error'].split())})")
        return answer

    def _exchange(self, line: bytes) -> dict[str, Any]:
        try:
            connection, answers = self._connection()
        except OSError as error:
            raise RequestError(
                f"messages: no process can be started to run the chat template ({error.strerror}); "
                "write the conversation yourself and give it as a prompt"
            ) from error
        try:
            connection.sendall(line)
            if answer := answers.readline():
                return json.loads(answer)
        except TimeoutError as error:
            raise RequestError(f"messages: the chat template took more than {PATIENCE_S:g} s; mend it") from error
        except ConnectionError:
            pass  # the process ended before it took the request; its status says why
        raise RequestError(f"messages: the chat template {self._end_of_process()}; mend it")

    def _end_of_process(self) -> str:
        code = self._process.wait(PATIENCE_S) if self._process else 0
        if code == -signal.SIGPROF:
            return f"took more than {TIME_S:g} s of processor time"
        return f"took more than {MEMORY_BYTES >> 20} MiB of memory, or its process was ended (status {code})"

    def _connection(self) -> tuple[socket.socket, IO[bytes]]:
        """Returns the socket of the process that runs, or of a new one."""
        if self._socket is not None and self._answers is not None and self._process and self._process.poll() is None:
            return self._socket, self._answers
        self.end()
        here, there = socket.socketpair()
        here.settimeout(PATIENCE_S)
        self._socket, self._answers = here, here.makefile("rb")
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(WORKER), str(there.fileno()), json.dumps(sys.path)],
                pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return self._socket, self._answers

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Leaves the process to itself: it ends with the last socket to it, and a forked child needs its own."""
        if self._answers is not None:
            self._answers.close()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.returncode = self._process.returncode or 0  # a child cannot wait for it
        self._process = self._socket = self._answers = None


def _after_fork() -> None:
    _WORKER.forget()
    _WORKER.__init__()


_WORKER = _Worker()
atexit.register(_WORKER.end)
os.register_at_fork(after_in_child=_after_fork)
