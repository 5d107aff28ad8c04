"""The mesh of devices: named axes for batch rows, experts, and the heads and hidden units of each layer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxspec.errors import ConfigError

AXES = ("data", "expert", "tensor")


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all of ``AXES``; those that ``sizes`` leaves out have one device.

    Args:
      sizes: devices along each axis.
      devices: to lay out; all by default, of which the first ones are taken where fewer are needed.

    Raises:
      ConfigError: an axis is not known, a size is not a whole number of at least 1, or there are too few devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise ConfigError(f"mesh: unknown axes {unknown}; known are {', '.join(AXES)}")
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"mesh: {axis} must be a whole number of at least 1, got {size!r}")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    needed = math.prod(shape)
    if needed > len(devices):
        product = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
        raise ConfigError(
            f"mesh: {product} needs {needed} devices, there are {len(devices)}; lower a size, or start more processes"
        )
    whose = {device.process_index for device in devices[:needed]}
    if len(whose) < len({device.process_index for device in devices}):
        raise ConfigError(
            f"mesh: {needed} of {len(devices)} devices leave processes without any; give sizes whose product is "
            f"{len(devices)}, or start fewer processes"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:needed])
