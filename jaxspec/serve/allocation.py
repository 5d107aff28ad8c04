"""Where an engine's arrays are allocated: on the devices of the target's parameters."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

from jaxspec.decode.state import Target
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.sharding.placement import allocate, mesh_of, row_axes, state_rules

T = TypeVar("T")


def allocate_on(make: Callable[[], T], target: Target, spec: EngineSpec) -> T:
    """Allocates arrays on the devices of the target's parameters."""
    mesh = mesh_of(target.params)
    if mesh is not None:
        return allocate(make, mesh, places_of(target, spec))
    with jax.default_device(next(iter(jax.tree.leaves(target.params)[0].devices()))):
        return make()


def places_of(target: Target, spec: EngineSpec) -> Mapping[str, tuple[str, ...]]:
    """Returns mesh axes of the state's arrays by letter: rows over ``data``, or also ``expert`` if exchanged."""
    policy = target.net.policy
    if policy.compute.mesh is None:
        return {}
    over = row_axes(policy.compute.mesh, spec.rows, spread=policy.compute.transport != "sum")
    return state_rules(over, own_pages=not spec.pages and policy.layout.depth == "unrolled")
