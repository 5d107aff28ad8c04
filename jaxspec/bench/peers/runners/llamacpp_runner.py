"""Runs llama.cpp's server for a benchmark: plain, its simple n-gram lookup, its draft model."""

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import wire

START_S, ANSWER_S = 300.0, 900.0


class LlamaCpp:
    """A server that this process starts and ends; its own timings say how long decoding took."""

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
        found = [
            "-m",
            options["gguf"],
            "--host",
            "127.0.0.1",
            "--port",
            self._port,
            "-c",
            context,
            "-np",
            wanted["rows"],
        ]
        found += ["-t", 1, "-tb", 1, "-fa", "on", "--no-warmup", "--no-webui", "--offline"]
        if wanted["mode"] == "ngram-simple":
            found += ["--spec-type", "ngram-simple", "--spec-draft-n-max", k, "--spec-ngram-simple-size-n", 3]
            found += ["--spec-ngram-simple-size-m", k]
        if wanted["mode"] == "draft-simple":
            if "draft_gguf" not in options:
                raise ValueError("llama.cpp needs the draft model as a GGUF file, too (draft_gguf)")
            found += ["--spec-type", "draft-simple", "-md", options["draft_gguf"], "--spec-draft-n-max", k]
        return [str(argument) for argument in found]

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._server.returncode} while starting")
            try:
                self._ask("GET", "/health", None)
                return
            except (OSError, RuntimeError, http.client.HTTPException):
                time.sleep(0.1)
        raise TimeoutError(f"the server was not ready within {START_S:.0f} s")

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{path}: status {reply.status}: {data[:200]!r}")
        return json.loads(data)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Sends as many requests at a time as there are slots."""
        clock = wire.Clock()
        wanted = {
            "n_predict": max_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True, "samplers": ["temperature"], "stream": False,
        }  # fmt: skip
        with ThreadPoolExecutor(self._rows) as pool:
            replies = list(
                pool.map(lambda ids: self._ask("POST", "/completion", {"prompt": list(ids), **wanted}), prompts)
            )
        timings = [reply["timings"] for reply in replies]
        # Slots decode side by side: the time of all of them together is what one slot saw.
        clock.tokens = sum(t["predicted_n"] for t in timings)
        clock.time_s = sum(t["predicted_ms"] for t in timings) / 1e3 / min(self._rows, len(prompts))
        passes = sum(t["predicted_n"] - t.get("draft_n_accepted", 0) for t in timings)
        return wire.answer(clock, [reply["tokens"] for reply in replies], passes)

    def close(self) -> None:
        """Ends the server."""
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


if __name__ == "__main__":
    wire.serve(LlamaCpp)
