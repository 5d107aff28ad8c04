"""Routed experts whose weights a mesh splits: every device computes its own experts for the rows that reach it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxspec.nn.devices import Devices
from jaxspec.nn.expert_transport import TRANSPORTS
from jaxspec.nn.fused_routing import SortedRows
from jaxspec.nn.param import Param, declared
from jaxspec.nn.policy import Policy
from jaxspec.nn.steady import added_products
from jaxspec.shapes import Array
from jaxspec.sharding.axis_rules import mesh_axes
from jaxspec.sharding.mesh import AXES
from pallas_kernels.quantized import Quantized, Weight

# All experts in one array.
ROUTED = {
    param.name: param
    for param in (
        Param("gate_up_ED2F", ("expert", "embed", "gate_up", "mlp"), "weight", part="routed experts"),
        Param("down_EFD", ("expert", "mlp", "embed"), "weight", part="routed experts"),
        Param("gate_up_bias_E2F", ("expert", "gate_up", "mlp"), "bias", part="routed experts"),
        Param("down_bias_ED", ("expert", "embed"), "bias", part="routed experts"),
    )
}
Compute = Callable[..., Array]


def split(mesh: AbstractMesh | None) -> bool:
    """Whether there is a mesh of several devices."""
    return mesh is not None and any(mesh.shape.get(axis, 1) > 1 for axis in AXES)


def obstacles_on(mesh: AbstractMesh | None, experts: Mapping[str, Weight]) -> list[str]:
    """Returns why devices cannot each compute their part; empty if they can."""
    if mesh is None or not split(mesh):
        return []
    reasons = []
    for name, w in experts.items():
        for leaf in (w.data, w.scale) if isinstance(w, Quantized) else (w,):
            for axis, size in zip(_spec(mesh, name, leaf), leaf.shape, strict=True):
                if axis is not None and size % mesh.shape[axis]:
                    reasons.append(f"{name}: {size} over {mesh.shape[axis]} devices of the axis {axis}")
    return reasons


def rows_on_each(policy: Policy, rows: int) -> int:
    """Returns the most of M rows that reach a device, and so the number that it computes with."""
    mesh = policy.compute.mesh
    if mesh is None or not split(mesh):
        return rows
    data, expert = mesh.shape["data"], mesh.shape["expert"]
    if policy.compute.transport != "sum" and expert > 1:
        return -(-rows // (data * expert)) * expert
    return rows if rows % data else rows // data


def on_each_device(
    compute: Compute,
    policy: Policy,
    x: Array,
    expert_MA: Array,
    weight_MA: Array,
    experts: dict[str, Weight],
    layer: Array | None,
    sorted_rows: SortedRows | None = None,
) -> Array:
    """Runs ``compute`` on every device with the part of the weights that it holds; float32 [M, D].

    The rows are split over ``data`` where it divides them. Along ``expert`` they are whole on every device (transport
    ``sum``), or split too and taken to the experts and back (``padded``, ``ragged``). Hidden units are split over
    ``tensor``, and summed over it at the end. Every transport adds what one device adds in another order: the last bits
    of the float32 sums differ from one device's.

    Args:
      compute: takes rows, choices counted from the device's first expert, combine weights, and by name ``experts``,
        ``layer`` and ``sorted_rows``; choices that are not among its experts add nothing.
      policy: knows the mesh, with all of its axes, the transport and the dtype in which rows are computed with.
      x: rows [M, D], or [2, M, D / 2] as of ``run_experts``.
      expert_MA: choices among all experts, negative for none.
      weight_MA: combine weights.
      experts: ``gate_up_ED2F`` and so on, with a leading axis of layers if ``layer`` is given.
      layer: index in the stack.
      sorted_rows: see ``run_experts``; only where every device has all rows and a part of every expert.
    """
    assert policy.compute.mesh is not None, "asked of a policy with a mesh"
    mesh: AbstractMesh = policy.compute.mesh
    rows = len(expert_MA)
    transport: Literal["sum", "padded", "ragged"] = policy.compute.transport if mesh.shape["expert"] > 1 else "sum"
    over = ("data",) if transport == "sum" else ("data", "expert")
    missing = 0
    if transport != "sum":
        missing = -rows % (mesh.shape["data"] * mesh.shape["expert"])
    elif rows % mesh.shape["data"]:
        over = ()
    x = x if transport == "sum" else as_rows(x)
    if missing:
        x, weight_MA = (jnp.pad(each, ((0, missing), (0, 0))) for each in (x, weight_MA))
        expert_MA = jnp.pad(expert_MA, ((0, missing), (0, 0)), constant_values=-1)
    sums = tuple(a for a in (("expert", "tensor") if transport == "sum" else ("tensor",)) if mesh.shape[a] > 1)
    specs = _specs(mesh, experts)

    def on_one(
        x: Array, choice: Array, weight: Array, experts: dict[str, Weight], layer: Array | None,
        sorted_rows: SortedRows | None,
    ) -> Array:  # fmt: skip
        own = partial(compute, experts=experts, layer=layer, sorted_rows=sorted_rows)
        if mesh.shape["tensor"] > 1 and "down_bias_ED" in experts:
            own = _biased_once(compute, experts, layer, sorted_rows)
        local = experts["down_EFD"].shape[-3]
        out = TRANSPORTS[transport](own, x, choice, weight, local, policy.compute.dtype)
        return lax.psum(out, sums) if sums else out

    spec = P(over or None, None)
    each = P(*spec) if x.ndim == 2 else P(None, *spec)
    in_specs = (each, spec, spec, specs, P(), P())
    run = jax.shard_map(on_one, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)
    out_MD = run(x, expert_MA, weight_MA, experts, layer, sorted_rows)
    return out_MD[:rows] if missing else out_MD


def _biased_once(
    compute: Compute, experts: dict[str, Weight], layer: Array | None, sorted_rows: SortedRows | None
) -> Callable[[Array, Array, Array], Array]:
    """Lets the first device along ``tensor`` alone add the last bias: hidden units are split, their sum is one."""
    bias: Any = experts["down_bias_ED"]
    others = {name: w for name, w in experts.items() if name != "down_bias_ED"}
    own = partial(compute, experts=others, layer=layer, sorted_rows=sorted_rows)

    def run(x: Array, expert_MA: Array, weight_MA: Array) -> Array:
        adds_MA = (expert_MA >= 0) & (expert_MA < bias.shape[-2]) & (lax.axis_index("tensor") == 0)
        index_MA = jnp.clip(expert_MA, 0, bias.shape[-2] - 1)
        share_MA = jnp.where(adds_MA, weight_MA.astype(jnp.float32), 0)
        lead = () if layer is None else (layer,)
        each = range(expert_MA.shape[1])
        pairs = ((share_MA[:, a, None], bias[(*lead, index_MA[:, a])].astype(jnp.float32)) for a in each)
        return own(x, expert_MA, weight_MA) + added_products(pairs)

    return run


def own_experts(mesh: AbstractMesh | None, experts: Mapping[str, Weight]) -> Mapping[str, Any]:
    """Returns the weights that a device has, of which only shapes and dtypes matter."""
    if mesh is None or not split(mesh):
        return experts
    return Devices(mesh).part(dict(experts), _specs(mesh, experts))


def as_rows(x: Array) -> Array:
    """Returns rows [M, D], put together from even and odd columns where they lie apart."""
    return x if x.ndim == 2 else jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1)


def _spec(mesh: AbstractMesh, name: str, leaf: Array) -> tuple[str | None, ...]:
    return mesh_axes(declared((name,)).axes_of(leaf.ndim), mesh)


def _specs(mesh: AbstractMesh, experts: Mapping[str, Weight]) -> dict[str, Any]:
    return {name: jax.tree.map(lambda leaf, name=name: P(*_spec(mesh, name, leaf)), w) for name, w in experts.items()}
