"""Several processes as one machine: how they meet, take one's word for all, and notice that they differ."""

import ctypes
import hashlib
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxspec.errors import ConfigError, JaxspecError

T = TypeVar("T")
MEETING_S, LOST_S = 120, 30
WORD = 256
AGAIN = "what is written stays, start the same command on all of them again to go on"
_HANDLERS: list[Any] = []  # C keeps only their addresses


def meet(
    coordinator: str | None = None,
    processes: int | None = None,
    number: int | None = None,
    *,
    meeting_s: int = MEETING_S,
    lost_s: int = LOST_S,
) -> None:
    """Joins this process to the others; call it before anything else that uses JAX's devices.

    Under Slurm, Open MPI and Kubernetes JAX finds out by itself what is left out.

    Args:
      coordinator: address and port of process 0, the same for all.
      processes: how many there are.
      number: of this one, from 0.
      meeting_s: how long to wait for the others.
      lost_s: how long another process may be silent until this one ends, too.

    Raises:
      ConfigError: nothing says where the others are, or process 0 does not answer. Process 0 itself is ended by JAX
        (DEADLINE_EXCEEDED) if the others do not come in time, and so is each later if another one is silent for too
        long; what to do is then written to standard error.
    """
    if coordinator is not None and number:
        _reach(coordinator, meeting_s)
    _explain_abort(lost_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator, processes, number, initialization_timeout=meeting_s, heartbeat_timeout_seconds=lost_s,
            shutdown_timeout_seconds=lost_s,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError) as error:
        raise _apart(coordinator or "the address that the cluster gives", str(error).strip().splitlines()[0]) from error


def _reach(coordinator: str, meeting_s: int) -> None:
    """Waits until process 0 listens; JAX would end this process without a word that helps."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"hosts: the coordinator's address is HOST:PORT, got {coordinator!r}")
    until = time.monotonic() + meeting_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise _apart(coordinator, f"nothing answers for {meeting_s} s: {error}") from error
            time.sleep(0.2)


def _explain_abort(lost_s: int) -> None:
    """Writes what to do when JAX aborts this process.

    It does so in C++ when another process is silent, while Python waits for that one; a handler of C's is the only
    place for words of ours.
    """
    words = (
        "jaxspec: hosts: JAX ended this process for the reason above; if that is tasks that are unhealthy, or a "
        f"deadline that was not met, another process was lost, or silent for {lost_s} s: {AGAIN}\n"
    ).encode()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    _HANDLERS.append(kind(lambda _: os.write(2, words) and None))
    ctypes.CDLL(None).signal(signal.SIGABRT, _HANDLERS[-1])


def _apart(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"hosts: the processes did not meet at {where} ({what}); give every process the same --coordinator-address "
        "HOST:PORT and --num-processes, its own --process-id, and start all of them"
    )


def several() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def first() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def agreed(value: T) -> T:
    """Process 0's arrays, on the host, for every process; all must ask for arrays of the same shapes."""
    return multihost_utils.broadcast_one_to_all(value) if several() else value


def most(value: int) -> int:
    """The greatest of all processes' numbers."""
    return int(np.max(multihost_utils.process_allgather(np.int32(value)))) if several() else value


def told(message: Mapping[str, Any] | None) -> dict[str, Any]:
    """Process 0's message, for every process; what the others bring counts nothing."""
    if not several():
        return dict(message or {})
    data = json.dumps(message).encode() if first() else b""
    size = int(agreed(np.int32(len(data))))
    room = np.zeros(-(-size // WORD) * WORD, np.uint8)
    room[: len(data)] = np.frombuffer(data, np.uint8)
    return json.loads(bytes(np.asarray(agreed(room))[:size]))


def led(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What process 0 found when it did something that one process is to do, for every process.

    Raises:
      ConfigError: process 0 failed, which itself raises what it met.
    """
    if not first():
        said = told(None)
        if "error" in said:
            raise ConfigError(f"hosts: process 0 failed: {said['error']}")
        return said
    try:
        found = work()
    except JaxspecError as error:
        told({"error": str(error)})
        raise
    return told(found)


def whole(tree: T) -> T:
    """Arrays on the host of every process, however they lie on the devices of all; all must ask."""
    return multihost_utils.process_allgather(tree, tiled=True) if several() else jax.device_get(tree)


def share(mesh: Mesh, axis: str) -> tuple[int, int]:
    """Which part of what is split over a mesh axis this process's devices hold, and how many parts there are.

    Raises:
      ConfigError: its devices are not neighbours along the axis.
    """
    along, size = mesh.axis_names.index(axis), mesh.shape[axis]
    own = sorted({place[along] for place, device in np.ndenumerate(mesh.devices) if device in mesh.local_devices})
    count = len(own)
    if size % count or own[0] % count or own[-1] - own[0] >= count:
        raise ConfigError(
            f"hosts: this process has the places {own} of {size} along {axis}, which is no even share; give each "
            "process as many devices as the others"
        )
    return own[0] // count, size // count


def check_shared(directory: Path) -> None:
    """Makes sure that all processes see what process 0 writes into a directory.

    Raises:
      ConfigError: some do not; their numbers are given.
    """
    if not several():
        return
    mark = directory / f".seen-{told({'mark': uuid.uuid4().hex})['mark']}"
    led(lambda: mark.touch() or {})
    seen = np.asarray(multihost_utils.process_allgather(np.int32(mark.exists())))
    if first():
        mark.unlink()
    if blind := np.flatnonzero(seen == 0).tolist():
        raise ConfigError(
            f"hosts: {directory}: processes {blind} do not see what process 0 writes there; give all of them the same "
            "directory on a file system that they share"
        )


def check_same(parts: Mapping[str, Any]) -> None:
    """Compares what every process has.

    Args:
      parts: JSON values by name; what JSON does not know is compared as it is written.

    Raises:
      ConfigError: processes differ; their numbers and the names are given.
    """
    if not several():
        return
    digests = [hashlib.sha256(json.dumps(parts[name], sort_keys=True, default=str).encode()).digest() for name in parts]
    own = np.stack([np.frombuffer(d, np.uint8) for d in digests])
    found = np.asarray(multihost_utils.process_allgather(own))
    wrong = {
        name: [int(p) for p in np.flatnonzero((found[:, i] != found[0, i]).any(axis=1))] for i, name in enumerate(parts)
    }
    if any(wrong.values()):
        said = "; ".join(f"{name}: processes {who} have another than process 0" for name, who in wrong.items() if who)
        raise ConfigError(f"hosts: {said}; give every process the same")


@contextmanager
def all_there() -> Iterator[None]:
    """Says what to do when another process is gone.

    Raises:
      JaxspecError: what this process waited for did not come.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        said = str(error).partition("\n")[0]
        if not several() or not (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in said):
            raise
        raise JaxspecError(f"hosts: another process was lost, or failed ({said}); {AGAIN}") from error
