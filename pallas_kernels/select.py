"""Which implementation of an operation runs, and why."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import cast

from pallas_kernels.backend import Implementation

WANTED = ("auto", "triton", "mosaic", "native", "interpret", "mosaic_interpret", "xla")
INSTEAD = {"mosaic": "triton", "mosaic_interpret": "interpret"}
NO_MOSAIC = ("there is none of this operation",)


class UnsupportedKernel(ValueError):
    """A kernel was asked for by name and cannot compute this case."""


class SlowKernelWarning(UserWarning):
    """A reference runs where a kernel was to be expected."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for one operation and shape.

    Attributes:
      op: name of its folder.
      case: the shape, in words.
      implementation: what runs.
      reason: why.
    """

    op: str
    case: str
    implementation: Implementation
    reason: str


def choose(
    op: str,
    case: str,
    wanted: str,
    platform: str,
    obstacles: list[str],
    *,
    mosaic: Sequence[str] = NO_MOSAIC,
    faster: str = "",
) -> Choice:
    """Chooses for one case of an operation.

    Args:
      op: name of its folder.
      case: the shape, in words.
      wanted: ``auto`` takes the kernel on a GPU where nothing stands in the way, the faster one of two that are
        measured, and the reference elsewhere;
        ``triton``, ``interpret`` and, on a CPU, ``native`` take the kernel or warn once and take the reference; ``xla``
        takes the reference. ``mosaic`` and ``mosaic_interpret`` take that kernel where nothing stands in its way, and
        are ``triton`` and ``interpret`` elsewhere.
      platform: that the program is compiled for: ``cuda``, ``cpu``, ...
      obstacles: why the kernel cannot compute this case, each a sentence; empty if it can.
      mosaic: the same of the Mosaic kernel.
      faster: the measurement by which that kernel takes the place of Triton's; empty if there is none.

    Raises:
      UnsupportedKernel: ``wanted`` is none of these.
    """
    choice = _choose(op, case, INSTEAD.get(wanted, wanted), platform, obstacles)
    if wanted in INSTEAD and not mosaic:
        choice = Choice(op, case, cast(Implementation, wanted), "asked for")
    elif wanted in INSTEAD and choice.implementation != "xla":
        choice = replace(choice, reason=f"no Mosaic kernel: {'; '.join(mosaic)}")
    elif wanted == "auto" and choice.implementation == "triton" and faster and not mosaic:
        choice = replace(choice, implementation="mosaic", reason=faster)
    record = _record.get()
    if record is not None:
        record.append(choice)
    elif obstacles and choice.reason == "; ".join(obstacles):
        _warn_once(choice)
    return choice


def _choose(op: str, case: str, wanted: str, platform: str, obstacles: list[str]) -> Choice:
    if wanted not in WANTED:
        raise UnsupportedKernel(f"kernels: must be one of {', '.join(WANTED)}, got {wanted!r}")
    if wanted == "xla":
        return Choice(op, case, "xla", "asked for")
    if wanted == "auto" and platform not in ("cuda", "gpu"):
        return Choice(op, case, "xla", f"kernels are for GPUs, this is {platform}")
    if wanted == "native" and platform != "cpu":
        obstacles = [*obstacles, "native kernels are for CPUs, and called by other names"]
    if obstacles:
        return Choice(op, case, "xla", "; ".join(obstacles))
    if wanted in ("interpret", "native"):
        return Choice(op, case, wanted, "asked for")
    return Choice(op, case, "triton", "asked for" if wanted == "triton" else "a GPU, and the kernel covers this case")


_record: ContextVar[list[Choice] | None] = ContextVar("record", default=None)


@contextmanager
def recording() -> Iterator[list[Choice]]:
    """Collects every choice that is made inside, instead of warning of any."""
    choices: list[Choice] = []
    token = _record.set(choices)
    try:
        yield choices
    finally:
        _record.reset(token)


_warned: set[Choice] = set()


def _warn_once(choice: Choice) -> None:
    if choice not in _warned:
        _warned.add(choice)
        warnings.warn(f"{choice.op} ({choice.case}) runs without its kernel: {choice.reason}", SlowKernelWarning, 3)
