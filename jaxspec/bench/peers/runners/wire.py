"""The line protocol of runner programs: JSON requests on standard input, JSON answers on standard output.

``{"op": "load", "model", "draft", "mode", "k", "dtype", "rows", "capacity", "options"}`` is answered by
``{"version"}``, then each ``{"op": "run", "prompts", "max_tokens"}`` by the fields of ``answer``; what goes wrong by
``{"error"}``.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Peer(Protocol):
    """A loaded peer; ``version`` is its own."""

    version: str

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Generates greedily for all prompts, ``rows`` of them together, end-of-text ids ignored; see ``answer``."""
        ...

    def close(self) -> None:
        """Ends whatever it started."""
        ...


class Clock:
    """Times the decode loop from inside: what came after every row had its first token."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ended: float | None = None
        self.tokens, self.time_s = 0, 0.0
        self._last: tuple[int, float] | None = None

    def decoding(self, total: int, now: float | None = None) -> None:
        """Notes that every row decodes, and that ``total`` tokens are there by now (``time.perf_counter``)."""
        now = time.perf_counter() if now is None else now
        if self._last is not None:
            self.tokens += total - self._last[0]
            self.time_s += now - self._last[1]
        self._last = total, now

    def pause(self) -> None:
        """Notes that not every row decodes from here on."""
        self._last = None

    def stop(self) -> None:
        """Notes that the run is over; what comes until its answer is not counted."""
        self.ended = time.perf_counter()


def answer(clock: Clock, token_ids: Sequence[Sequence[int]], passes: int | None) -> dict[str, Any]:
    """Returns the reply to a run.

    Args:
      clock: started with the run.
      token_ids: generated for each prompt, the prompt left out.
      passes: of the target over a row, summed over rows; None if the peer does not tell.
    """
    return {
        "token_ids": [list(ids) for ids in token_ids],
        "time_s": (clock.ended or time.perf_counter()) - clock.began,
        "decode_tokens": clock.tokens,
        "decode_time_s": clock.time_s,
        "passes": passes,
    }


def serve(load: Callable[[dict[str, Any]], Peer]) -> None:
    """Answers requests until standard input ends; what libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runner: Peer | None = None
    try:
        for line in sys.stdin:
            try:
                request = json.loads(line)
                if request["op"] == "load":
                    runner = load(request)
                    reply: dict[str, Any] = {"version": runner.version}
                elif runner is None:
                    reply = {"error": "run came before load"}
                else:
                    reply = runner.run(request["prompts"], request["max_tokens"])
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(reply) + "\n")
            out.flush()
    finally:
        if runner is not None:
            runner.close()
