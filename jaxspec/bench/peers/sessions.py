"""Other engines in a sweep: which of their methods answers which of ours, their processes, their figures."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jaxspec.bench.grid import NONE, EnginePoint
from jaxspec.bench.measure import Run
from jaxspec.bench.record import PeerFigures, Skipped, Spread
from jaxspec.errors import ConfigError, JaxspecError

RUNNERS = Path(__file__).parent / "runners"
LOAD_S, RUN_S = 600.0, 1800.0
# Of each peer, its method that answers one of ours.
MODES: Mapping[str, Mapping[str, str]] = {
    "transformers": {NONE: "plain", "ngram": "lookup", "draft_model": "assistant"},
    "vllm": {NONE: "plain", "ngram": "ngram", "draft_model": "draft_model"},
    "llamacpp": {NONE: "plain", "ngram": "ngram-simple", "draft_model": "draft-simple"},
}


class PeerError(JaxspecError):
    """A peer could not be started, or did not answer."""


class PeerRun(msgspec.Struct, frozen=True):
    """One run of a peer; fields as ``wire.answer`` gives them."""

    token_ids: list[list[int]]
    time_s: float
    decode_tokens: int
    decode_time_s: float
    passes: int | None

    @property
    def tokens(self) -> int:
        """Generated in all."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        """Rate of the whole run."""
        return self.tokens / self.time_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Rate while every row decoded, None if that never was."""
        return self.decode_tokens / self.decode_time_s if self.decode_tokens else None

    def __add__(self, other: "PeerRun") -> "PeerRun":
        """Returns both, one after the other."""
        return PeerRun(
            self.token_ids + other.token_ids,
            self.time_s + other.time_s,
            self.decode_tokens + other.decode_tokens,
            self.decode_time_s + other.decode_time_s,
            None if self.passes is None or other.passes is None else self.passes + other.passes,
        )


@dataclass(frozen=True)
class PeerChoice:
    """A peer that takes part.

    Attributes:
      name: key of ``MODES``.
      python: that runs its runner, one that has the peer installed.
      options: for the runner: ``server``, ``gguf`` and ``draft_gguf`` of llama.cpp.
      runner: program; by default the one in ``runners/``.
    """

    name: str
    python: str = sys.executable
    options: Mapping[str, str] = field(default_factory=dict)
    runner: Path | None = None

    def mode(self, engine: EnginePoint) -> str | None:
        """Returns how it decodes to answer one of our engines, None where it has nothing like it."""
        if isinstance(engine.k, str):
            return None
        method = NONE if engine.drafter is None else str(engine.drafter.config.get("method", "draft_model"))
        return MODES[self.name].get(method)


class PeerSession:
    """A process that runs one peer in one mode; the caller's core and environment are inherited."""

    def __init__(self, choice: PeerChoice, mode: str, setup: Mapping[str, Any]):
        self.peer, self.mode, self.version = choice.name, mode, ""
        self._pending = b""
        log, name = tempfile.mkstemp(prefix="jaxspec-peer-")
        self._log = Path(name)
        runner = choice.runner or RUNNERS / f"{choice.name}_runner.py"
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        try:
            self._process = subprocess.Popen(
                [choice.python, str(runner)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
            )  # fmt: skip
        except OSError as error:
            self._log.unlink()
            raise PeerError(f"{self.name}: {choice.python} does not start ({error})") from error
        finally:
            os.close(log)
        try:
            request = {"op": "load", **setup, "mode": mode, "options": dict(choice.options)}
            self.version = str(self._ask(request, LOAD_S)["version"])
        except BaseException:
            self.stop()
            raise

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.peer} {self.mode}"

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> PeerRun:
        """Generates greedily for all prompts.

        Raises:
          PeerError: it did not answer, or answered with an error.
        """
        request = {"op": "run", "prompts": [list(ids) for ids in prompts], "max_tokens": max_tokens}
        try:
            peer_run = msgspec.convert(self._ask(request, RUN_S), PeerRun)
        except msgspec.ValidationError as error:
            raise PeerError(f"{self.name}: not an answer to a run ({error})") from error
        if [len(ids) for ids in peer_run.token_ids] != [max_tokens] * len(prompts):
            raise PeerError(f"{self.name}: {max_tokens} tokens for each of {len(prompts)} prompts were asked for")
        return peer_run

    def stop(self) -> None:
        """Ends the process, which ends what it started."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if not self._ended():
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.unlink(missing_ok=True)

    def _ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            reply = json.loads(self._line(limit_s))
        except (OSError, ValueError) as error:
            raise PeerError(f"{self.name}: no answer ({error}){self._complaint()}") from error
        if not isinstance(reply, dict) or "error" in reply:
            raise PeerError(f"{self.name}: {reply['error'] if isinstance(reply, dict) else reply}")
        return reply

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        end, descriptor = time.monotonic() + limit_s, self._process.stdout.fileno()
        while b"\n" not in self._pending:
            ready = select.select([descriptor], [], [], max(end - time.monotonic(), 0))[0]
            data = os.read(descriptor, 1 << 16) if ready else b""
            if not ready:
                raise OSError(f"nothing within {limit_s:.0f} s")
            if not data:
                self._ended()
                raise OSError("it ended")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _ended(self) -> bool:
        """Waits for the process to end by itself; until then it may still write why it does."""
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _complaint(self) -> str:
        """Returns the last line that it wrote on standard error."""
        lines = self._log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it last said: {last[:200]}" if last else ""


def start_sessions(
    choices: Sequence[PeerChoice], engine: EnginePoint, *, model: Path, dtype: str, capacity: int
) -> tuple[list[PeerSession], list[Skipped]]:
    """Starts what can take part next to an engine; the rest is returned with the reason."""
    started, missing = [], []
    draft = str(engine.drafter.config["model"]) if engine.drafter and "model" in engine.drafter.config else None
    setup = {
        "model": str(model), "draft": draft, "k": engine.k, "dtype": dtype, "rows": engine.rows, "capacity": capacity,
    }  # fmt: skip
    for choice in choices:
        mode = choice.mode(engine)
        if mode is None:
            missing.append(Skipped(f"{choice.name} beside {engine.name}", "it has nothing like it here"))
            continue
        try:
            started.append(PeerSession(choice, mode, setup))
        except PeerError as error:
            missing.append(Skipped(f"{choice.name} {mode} beside {engine.name}", " ".join(str(error).split())))
    return started, missing


def peer_figures(session: PeerSession, runs: Sequence[PeerRun], ours: Sequence[Run], plain: Run) -> PeerFigures:
    """Computes the figures of a peer's rounds.

    Args:
      session: that ran.
      runs: one per round.
      ours: our runs of the same rounds that it is compared with.
      plain: a plain run of ours, whose tokens its tokens should be.
    """
    ratios = [
        a.decode_tokens_per_s / b.decode_tokens_per_s
        for a, b in zip(ours, runs, strict=True)
        if a.decode_tokens_per_s is not None and b.decode_tokens_per_s is not None
    ]
    rates = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s is not None]
    first = runs[0]
    differences = [_first_difference(a, b) for a, b in zip(plain.token_ids, first.token_ids, strict=True)]
    return PeerFigures(
        peer=session.peer,
        mode=session.mode,
        version=session.version,
        tokens_per_s=Spread.of([run.tokens_per_s for run in runs]),
        decode_tokens_per_s=Spread.of(rates) if len(rates) == len(runs) else None,
        ours=Spread.of(ratios) if len(ratios) == len(runs) else None,
        tokens_per_step=None if first.passes is None else first.tokens / max(first.passes, 1),
        same_texts=differences.count(None),
        first_differences=differences,
    )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def parse_peers(texts: Sequence[str]) -> list[PeerChoice]:
    """Returns the peers that the command line names.

    Args:
      texts: ``NAME=PYTHON``, or ``llamacpp=SERVER,MODEL.gguf`` with an optional draft model after another comma.

    Raises:
      ConfigError: a name is not known, or something is missing.
    """
    peers = []
    for text in texts:
        name, _, given = text.partition("=")
        if name not in MODES:
            raise ConfigError(f"bench: peer {name!r} is not known; known are {list(MODES)}")
        if name != "llamacpp":
            if not given:
                raise ConfigError(f"bench: --peers {name}=PYTHON needs a Python that has {name} installed")
            peers.append(PeerChoice(name, given))
            continue
        options: dict[str, str] = dict(zip(("server", "gguf", "draft_gguf"), given.split(","), strict=False))
        if "gguf" not in options:
            raise ConfigError("bench: --peers llamacpp=SERVER,MODEL.gguf needs the program llama-server and the model")
        peers.append(PeerChoice(name, options=options))  # its runner needs no more than a standard library
    return peers
