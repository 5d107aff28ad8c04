"""Routed experts whose weights a mesh splits: every device computes its own experts, and the outputs are summed."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxspec.nn.quantized import Quantized, Weight
from jaxspec.shapes import Array
from jaxspec.sharding.rules import logical_axes, mesh_axes

AXES = ("expert", "tensor")
Compute = Callable[[Array, Array, Array, dict[str, Weight], Array | None], Array]


def split(mesh: AbstractMesh) -> bool:
    """Whether a mesh splits routed experts at all."""
    return any(mesh.shape.get(axis, 1) > 1 for axis in AXES)


def obstacles_on(mesh: AbstractMesh | None, experts: Mapping[str, Weight]) -> list[str]:
    """Why devices cannot each compute their part by the kernel; empty if they can."""
    if mesh is None or not split(mesh):
        return []
    found = []
    for name, w in experts.items():
        for leaf in (w.data, w.scale) if isinstance(w, Quantized) else (w,):
            for axis, size in zip(_spec(mesh, name, leaf), leaf.shape, strict=True):
                if axis is not None and size % mesh.shape[axis]:
                    found.append(f"{name}: {size} over {mesh.shape[axis]} devices of the axis {axis}")
    return found


def on_each_device(
    compute: Compute,
    mesh: AbstractMesh,
    x_MD: Array,
    expert_MA: Array,
    weight_MA: Array,
    experts: dict[str, Weight],
    layer: Array | None,
) -> Array:
    """Runs ``compute`` on every device with the part of the weights that it holds; float32 [M, D], whole on each.

    Rows, choices and combine weights are whole on every device, so that nothing is sent before the products and one
    sum over the devices follows them.

    Args:
      compute: takes rows, choices counted from the device's first expert, combine weights, weights and the layer;
        choices that are not among its experts add nothing.
      mesh: with the axes ``expert`` and ``tensor``.
      x_MD: rows.
      expert_MA: choices among all experts.
      weight_MA: combine weights.
      experts: ``gate_up_ED2F`` and so on, with a leading axis of layers if ``layer`` is given.
      layer: place in the stack.
    """
    specs = {name: jax.tree.map(lambda leaf, name=name: P(*_spec(mesh, name, leaf)), w) for name, w in experts.items()}

    def own(x: Array, choice: Array, weight: Array, experts: dict[str, Weight], layer: Array | None) -> Array:
        held = experts["down_EFD"].shape[-3]
        first = lax.axis_index("expert").astype(jnp.int32) * held
        if "down_bias_ED" in experts:  # hidden units are split, but the bias of their sum counts once
            bias: Any = experts["down_bias_ED"]
            experts = experts | {"down_bias_ED": jnp.where(lax.axis_index("tensor") == 0, bias, 0).astype(bias.dtype)}
        # Choices before the first would count from behind.
        mine = jnp.where((choice >= first) & (choice < first + held), choice - first, -1)
        return lax.psum(compute(x, mine, weight, experts, layer), AXES)

    run = jax.shard_map(own, mesh=mesh, in_specs=(P(), P(), P(), specs, P()), out_specs=P(), check_vma=False)
    return run(x_MD, expert_MA, weight_MA, experts, layer)


def _spec(mesh: AbstractMesh, name: str, leaf: Array) -> tuple[str | None, ...]:
    return mesh_axes(logical_axes((name,), leaf), mesh)
