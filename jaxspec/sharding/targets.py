"""Devices that are not there: NVIDIA GPUs by their description, to compile for on any machine."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh

from jaxspec.errors import ConfigError


def target_devices(description: str, hosts: int = 1, per_host: int = 1) -> list[Any]:
    """Devices to put into a mesh and to compile for; nothing runs on them.

    Args:
      description: text of a ``stream_executor.GpuTargetConfigProto``.
      hosts: machines.
      per_host: GPUs of each.

    Raises:
      ConfigError: JAX has no CUDA plugin, or XLA refuses the description.
    """
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", target_config=description, topology=f"1x{hosts}x{per_host}"
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"no GPU can be described to XLA here: {error}") from None
    return list(topology.devices)


def target_context(devices: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """In which kernels are lowered for these devices; from JAX 0.11 on they want to know for which GPU."""
    try:
        from jax.sharding import AbstractDevice
    except ImportError:
        return contextlib.nullcontext()
    kind = AbstractDevice(device_kind=devices[0].device_kind, num_cores=None, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))
