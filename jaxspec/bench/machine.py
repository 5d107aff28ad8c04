"""What a measurement ran on: processor, accelerator and versions."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jaxspec", "jax", "jaxlib", "flax", "numpy")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine() -> dict[str, Any]:
    """Processor name, usable cores, and the device that JAX computes on."""
    device = jax.devices()[0]
    return {"cpu": _cpu_name(), "cores": _cores(), "backend": device.platform, "device": device.device_kind}


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide speed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout that was not installed
            continue
    return found
