"""Starts jaxspec in processes that meet; as a script, one that notes what it reads and dies where it is told to."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOST_S = 10
ROOT = Path(__file__).parents[2]


def together(
    *commands: list[str], reads: Path | None = None, dies: tuple[int, Path] | None = None
) -> list[subprocess.Popen]:
    """Starts processes of one device each that meet at a free port.

    Args:
      commands: one per process.
      reads: where each writes what it has read of the first model that it loads, as ``NAME-NUMBER.json``.
      dies: update before which the last one kills itself, and a directory that must be there by then.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    meet = ["--coordinator-address", f"localhost:{port}", "--num-processes", str(len(commands))]
    meet += ["--lost-timeout", str(LOST_S), "--meeting-timeout", "120"]
    started = []
    for number, command in enumerate(commands):
        wishes: dict[str, Any] = {"reads": f"{reads}-{number}.json"} if reads else {}
        wishes |= {"dies": [dies[0], str(dies[1])]} if dies and number == len(commands) - 1 else {}
        module = [sys.executable, "-m", "tests.oracle.one_of_several", json.dumps(wishes)]
        whole = [*module, *command, *meet, "--process-id", str(number)]
        started.append(
            subprocess.Popen(whole, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        )
    return started


def _note_reads(file: Path) -> None:
    from jaxspec.checkpoint.files.stream import TensorFiles
    from jaxspec.checkpoint.load import model as load

    mapped: set[str] = set()
    get, fill = TensorFiles.__getitem__, load.fill

    def noted(files: Any, name: str) -> Any:
        mapped.add(name)
        return get(files, name)

    def filled(plan: Any, *rest: Any) -> Any:
        params = fill(plan, *rest)
        if not file.exists():
            file.write_text(json.dumps({"mapped": sorted(mapped), "taken": plan.files.released}))
        return params

    TensorFiles.__getitem__, load.fill = noted, filled


def _die_before(update: int, there: Path) -> None:
    from jaxspec.train import head_run

    batches = head_run.batches

    def ending(*rest: Any, first: int, **more: Any) -> Iterator[Any]:
        for step, batch in enumerate(batches(*rest, first=first, **more), first):
            if step == update:
                while not there.exists():
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    head_run.batches = ending


if __name__ == "__main__":
    from jaxspec.cli.main import main

    wanted = json.loads(sys.argv[1])
    if "reads" in wanted:
        _note_reads(Path(wanted["reads"]))
    if "dies" in wanted:
        _die_before(wanted["dies"][0], Path(wanted["dies"][1]))
    sys.exit(main(sys.argv[2:]))
