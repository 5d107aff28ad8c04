"""Describes what a measurement ran on: processor, accelerator, versions and model."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoint.load.places import abstract_params, flatten
from jaxspec.inspect.model_sizes import idle_parameters, parameters
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.policy import make_policy

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
    """Returns the processor's name, usable cores, and the device that JAX computes on."""
    device = jax.devices()[0]
    return {"cpu": _cpu_name(), "cores": _cores(), "backend": device.platform, "device": device.device_kind}


def describe_versions() -> dict[str, str]:
    """Returns versions of Python and of the packages that decide speed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # a checkout that was not installed
            continue
    return versions


def count_parameters(arch: ArchSpec) -> tuple[int, int]:
    """Counts all parameters, and those that one token uses: all but the experts that its router leaves out.

    Embedding and head count in both; multi-token prediction counts in neither.
    """
    net: Any = Transformer(arch, make_policy(depth="stacked"))
    leaves = flatten(abstract_params(net))
    total = sum(parameters(leaves).values())
    return total, total - idle_parameters(arch.layers, arch.model_dim)


def describe_model(config: dict[str, Any]) -> dict[str, Any]:
    """Returns family and sizes of a published config."""
    arch = arch_of(config)
    total, active = count_parameters(arch)
    model: dict[str, Any] = {
        "family": arch.family,
        "layers": len(arch.layers),
        "parameters": total,
        "active_parameters": active,
    }
    moe = [layer.ffn for layer in arch.layers if isinstance(layer.ffn, MoeSpec)]
    return model | ({"experts": moe[0].experts, "experts_per_token": moe[0].top_k} if moe else {})
