"""Several processes as one machine: connecting, broadcasting from process 0, and noticing that they differ."""

import ctypes
import hashlib
import json
import math
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
INITIALIZATION_TIMEOUT_S, HEARTBEAT_TIMEOUT_S = 120, 30
MESSAGE_BYTES = 256  # messages are padded to a multiple of it: few shapes are broadcast, and compiled
RESUME = "what is written stays, start the same command on all of them again to go on"
_HANDLERS: list[Any] = []  # C keeps only their addresses


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    number: int | None = None,
    *,
    initialization_timeout_s: int = INITIALIZATION_TIMEOUT_S,
    heartbeat_timeout_s: int = HEARTBEAT_TIMEOUT_S,
) -> None:
    """Connects this process to the others; call it before anything else that uses JAX's devices.

    Under Slurm, Open MPI and Kubernetes JAX detects the arguments that are left out.

    Args:
      coordinator: address and port of process 0, the same for all.
      processes: how many there are.
      number: of this one, from 0.
      initialization_timeout_s: how long to wait for the others.
      heartbeat_timeout_s: how long another process may be silent until this one ends, too.

    Raises:
      ConfigError: nothing says where the others are, or process 0 does not answer. Process 0 itself is ended by JAX
        (DEADLINE_EXCEEDED) if the others do not come in time, and so is each later if another one is silent for too
        long; what to do is then written to standard error.
    """
    if coordinator is not None and number:
        _wait_for(coordinator, initialization_timeout_s)
    _explain_abort(heartbeat_timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator, processes, number, initialization_timeout=initialization_timeout_s,
            heartbeat_timeout_seconds=heartbeat_timeout_s, shutdown_timeout_seconds=heartbeat_timeout_s,
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise _not_connected(coordinator or "the address that the cluster gives", reason) from error


def _wait_for(coordinator: str, timeout_s: int) -> None:
    """Waits until process 0 listens; JAX would end this process without a helpful message."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"hosts: the coordinator's address is HOST:PORT, got {coordinator!r}")
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise _not_connected(coordinator, f"nothing answers for {timeout_s} s: {error}") from error
            time.sleep(0.2)


def _explain_abort(heartbeat_timeout_s: int) -> None:
    """Writes what to do when JAX aborts this process.

    JAX aborts from C++ when another process is silent, while Python waits for that one; only a C signal handler can
    still print something.
    """
    message = (
        "jaxspec: hosts: JAX ended this process for the reason above; if that is tasks that are unhealthy, or a "
        f"deadline that was not met, another process was lost, or silent for {heartbeat_timeout_s} s: {RESUME}\n"
    ).encode()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    _HANDLERS.append(kind(lambda _: os.write(2, message) and None))
    ctypes.CDLL(None).signal(signal.SIGABRT, _HANDLERS[-1])


def _not_connected(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"hosts: the processes did not meet at {address} ({reason}); give every process the same --coordinator-address "
        "HOST:PORT and --num-processes, its own --process-id, and start all of them"
    )


def is_multiprocess() -> bool:
    """Whether there are other processes."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_leader() -> bool:
    """Whether this is process 0, the one that writes files."""
    return jax.process_index() == 0


def broadcast_arrays(tree: T) -> T:
    """Returns process 0's arrays, on the host; all processes must call it with arrays of the same shapes."""
    return multihost_utils.broadcast_one_to_all(tree) if is_multiprocess() else tree


def max_over_processes(value: int) -> int:
    """Returns the greatest of all processes' numbers."""
    return int(np.max(multihost_utils.process_allgather(np.int32(value)))) if is_multiprocess() else value


def broadcast_json(message: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns process 0's message in every process; the others' arguments are ignored."""
    if not is_multiprocess():
        return dict(message or {})
    data = json.dumps(message).encode() if is_leader() else b""
    size = int(broadcast_arrays(np.int32(len(data))))
    padded = np.zeros(-(-size // MESSAGE_BYTES) * MESSAGE_BYTES, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return json.loads(bytes(np.asarray(broadcast_arrays(padded))[:size]))


def run_on_leader(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Runs something in process 0 alone, and returns its result in every process.

    If it fails, the others raise ConfigError, and process 0 the error itself.
    """
    if not is_leader():
        message = broadcast_json(None)
        if "error" in message:
            raise ConfigError(f"hosts: process 0 failed: {message['error']}")
        return message
    try:
        result = work()
    except JaxspecError as error:
        broadcast_json({"error": str(error)})
        raise
    return broadcast_json(result)


def gather_to_host(tree: T) -> T:
    """Copies arrays, however they are sharded, to the host of every process; all must call it."""
    return multihost_utils.process_allgather(tree, tiled=True) if is_multiprocess() else jax.device_get(tree)


def local_share(mesh: Mesh, *axes: str) -> tuple[int, int]:
    """Returns which part of data split over mesh axes belongs to this process, and how many parts there are.

    Raises ConfigError if its devices are not neighbors along the axes.
    """
    along, sizes = [mesh.axis_names.index(axis) for axis in axes], [mesh.shape[axis] for axis in axes]
    size, local = math.prod(sizes), set(mesh.local_devices)
    places = [index for index, device in np.ndenumerate(mesh.devices) if device in local]
    own = sorted({int(np.ravel_multi_index([index[n] for n in along], sizes)) for index in places})
    count = len(own)
    if size % count or own[0] % count or own[-1] - own[0] >= count:
        raise ConfigError(
            f"hosts: this process has the places {own} of {size} along {', '.join(axes)}, which is no even share; give "
            "each process as many devices as the others"
        )
    return own[0] // count, size // count


def check_shared(directory: Path) -> None:
    """Checks that all processes see what process 0 writes into a directory; raises ConfigError with their numbers."""
    if not is_multiprocess():
        return
    mark = directory / f".seen-{broadcast_json({'mark': uuid.uuid4().hex})['mark']}"
    run_on_leader(lambda: mark.touch() or {})
    seen = np.asarray(multihost_utils.process_allgather(np.int32(mark.exists())))
    if is_leader():
        mark.unlink()
    if blind := np.flatnonzero(seen == 0).tolist():
        raise ConfigError(
            f"hosts: {directory}: processes {blind} do not see what process 0 writes there; give all of them the same "
            "directory on a file system that they share"
        )


def check_same(parts: Mapping[str, Any]) -> None:
    """Checks that every process has the same JSON values, by name; raises ConfigError with numbers and names."""
    if not is_multiprocess():
        return
    digests = [hashlib.sha256(json.dumps(parts[name], sort_keys=True, default=str).encode()).digest() for name in parts]
    own = np.stack([np.frombuffer(d, np.uint8) for d in digests])
    all_PNX = np.asarray(multihost_utils.process_allgather(own))
    differing = {
        name: np.flatnonzero((all_PNX[:, i] != all_PNX[0, i]).any(axis=1)).tolist() for i, name in enumerate(parts)
    }
    if any(differing.values()):
        words = "; ".join(
            f"{name}: processes {who} have another than process 0" for name, who in differing.items() if who
        )
        raise ConfigError(f"hosts: {words}; give every process the same")


@contextmanager
def explain_lost_process() -> Iterator[None]:
    """Turns the error of a lost process into a JaxspecError that says what to do."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if not is_multiprocess() or not (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in reason):
            raise
        raise JaxspecError(f"hosts: another process was lost, or failed ({reason}); {RESUME}") from error
