"""Time of every kernel in a step, from XLA's profiler."""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

SHOWN = 40  # kernels, those that take longest first


def profile(run: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """Returns the sums over all streams of the device, then each kernel's launches and microseconds in a step.

    Args:
      run: starts a dispatch that has run before.
      steps: of the dispatch.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        return _kernels(Path(folder), steps)


def _kernels(folder: Path, steps: int) -> list[dict[str, Any]]:
    count: dict[str, int] = defaultdict(int)
    busy_ns: dict[str, float] = defaultdict(float)
    first, last = float("inf"), 0.0
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    count[event.name] += 1
                    busy_ns[event.name] += event.duration_ns
                    first, last = min(first, event.start_ns), max(last, event.start_ns + event.duration_ns)
    order = sorted(busy_ns, key=lambda name: busy_ns[name], reverse=True)
    total = {
        "kernels": sum(count.values()) / steps, "busy_us": sum(busy_ns.values()) / steps / 1e3,
        "span_us": max(last - first, 0) / steps / 1e3,
    }  # fmt: skip
    return [
        total,
        *({"kernel": n, "launches": count[n] / steps, "us": busy_ns[n] / steps / 1e3} for n in order[:SHOWN]),
    ]
