"""Runs llama.cpp's server for a benchmark: plain, its simple n-gram lookup, its draft model."""

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import wire

START_S, ANSWER_S = 300.0, 900.0
REQUEST = {
    "temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True, "samplers": ["temperature"],
}  # fmt: skip


class Event(NamedTuple):
    """A message of a stream: when it came, its tokens, how many there are by then, the server's times at the end."""

    time_s: float
    tokens: list[int]
    count: int
    timings: dict[str, Any]


class LlamaCpp:
    """A server that this process starts and ends; when tokens come out of its streams says how fast it decodes."""

    def __init__(self, wanted: dict[str, Any]):
        options, self._rows = wanted["options"], wanted["rows"]
        if "gguf" not in options:
            raise ValueError(
                "llama.cpp reads GGUF files; convert the model with its converter and name the file (gguf)"
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        version = subprocess.run([options["server"], "--version"], capture_output=True, text=True, check=False)
        self.version = " ".join((version.stdout + version.stderr).split())[:80] or "unknown"
        self._server = subprocess.Popen(
            [options["server"], *self._arguments(wanted, options)], stdin=subprocess.DEVNULL
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _arguments(self, wanted: dict[str, Any], options: dict[str, Any]) -> list[str]:
        context, k = wanted["capacity"] * wanted["rows"], wanted["k"]
        words = ["-m", options["gguf"], "--host", "127.0.0.1", "--port", self._port, "-c", context]
        words += ["-np", wanted["rows"], "-t", 1, "-tb", 1, "--cache-ram", 0]
        words += ["--no-warmup", "--no-webui", "--offline"]
        # Its caches are float16 by default, so is a part of its flash attention: too coarse to give float32's tokens.
        cache, flash = {"float32": ("f32", "off"), "bfloat16": ("f16", "on")}[wanted["dtype"]]
        words += ["-fa", flash, "--cache-type-k", cache, "--cache-type-v", cache]
        if wanted["mode"] == "ngram-simple":
            words += ["--spec-type", "ngram-simple", "--spec-draft-n-max", k, "--spec-ngram-simple-size-n", 3]
            words += ["--spec-ngram-simple-size-m", k]
        if wanted["mode"] == "draft-simple":
            if "draft_gguf" not in options:
                raise ValueError("llama.cpp needs the draft model as a GGUF file, too (draft_gguf)")
            words += ["--spec-type", "draft-simple", "-md", options["draft_gguf"], "--spec-draft-n-max", k]
            words += ["--cache-type-k-draft", cache, "--cache-type-v-draft", cache]
        return [str(argument) for argument in words]

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._server.returncode} while starting")
            try:
                with self._reply("GET", "/health", None):
                    return
            except (OSError, RuntimeError, http.client.HTTPException):
                time.sleep(0.1)
        raise TimeoutError(f"the server was not ready within {START_S:.0f} s")

    @contextmanager
    def _reply(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"{path}: status {reply.status}: {reply.read()[:200]!r}")
            yield reply
        finally:
            connection.close()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Sends as many requests at a time as there are slots."""
        clock, wanted = wire.Clock(), {**REQUEST, "n_predict": max_tokens}
        with ThreadPoolExecutor(self._rows) as pool:
            streams = list(pool.map(lambda ids: self._stream({**wanted, "prompt": list(ids)}), prompts))
        clock.stop()
        _replay(clock, streams, min(self._rows, len(prompts)))
        token_ids = [[token for event in stream for token in event.tokens] for stream in streams]
        for place, ids in enumerate(token_ids):
            if len(ids) < max_tokens:
                # The stream leaves out tokens that end within a character.
                with self._reply("POST", "/completion", {**wanted, "prompt": list(prompts[place])}) as reply:
                    token_ids[place] = json.load(reply)["tokens"]
        timings = [stream[-1].timings for stream in streams]
        passes = sum(t["predicted_n"] - t.get("draft_n_accepted", 0) for t in timings)
        return wire.answer(clock, token_ids, passes)

    def _stream(self, request: dict[str, Any]) -> list["Event"]:
        """Reads the events of a request as they come, and parses them after the last."""
        with self._reply("POST", "/completion", request | {"stream": True}) as reply:
            lines = [(time.perf_counter(), line) for line in reply if line.strip()]
        events = []
        for time_s, line in lines:
            name, _, text = line.decode().partition(":")
            said = json.loads(text) if name == "data" else {}
            if "tokens" not in said:
                raise RuntimeError(f"/completion: {line[:200]!r}")
            events.append(Event(time_s, said["tokens"], said["tokens_predicted"], said.get("timings", {})))
        return events

    def close(self) -> None:
        """Ends the server."""
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def _replay(clock: wire.Clock, streams: Sequence[Sequence[Event]], rows: int) -> None:
    """Replays events to the clock in their order; it counts while every slot has read its prompt."""
    counts: dict[int, int] = {}
    busy: set[int] = set()
    moments = [
        (event.time_s, place, number) for place, stream in enumerate(streams) for number, event in enumerate(stream)
    ]
    for time_s, place, number in sorted(moments):
        event = streams[place][number]
        counts[place] = event.count
        if number + 1 < len(streams[place]):
            busy.add(place)
        else:
            busy.discard(place)
        if len(busy) == rows:
            clock.decoding(sum(counts.values()), time_s)
        else:
            clock.pause()


if __name__ == "__main__":
    wire.serve(LlamaCpp)
