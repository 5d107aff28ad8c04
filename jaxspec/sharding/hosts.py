"""Several processes as one machine: how they meet, take one's word for all, and notice that they differ."""

import hashlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.errors import ConfigError, JaxspecError

T = TypeVar("T")
MEETING_S, LOST_S = 120, 30
WORD = 256


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
        (DEADLINE_EXCEEDED) if the others do not come in time.
    """
    if coordinator is not None and number:
        _reach(coordinator, meeting_s)
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
        raise JaxspecError(
            f"hosts: another process was lost, or failed ({said}); what is written stays, start the same command on "
            "all of them again to go on"
        ) from error
