"""The programs of serving at a model's real shapes, nothing allocated: what is compiled to be looked at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jaxspec.checkpoint.catalog import known_tables
from jaxspec.checkpoint.places import unflatten
from jaxspec.checkpoint.plan import Plan, make_plan
from jaxspec.checkpoint.published import promised
from jaxspec.checkpoint.quantized import check_method
from jaxspec.decode.prefill import prefill
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import StepPlan, dispatch
from jaxspec.draft import catalog
from jaxspec.draft.null import NoDrafts
from jaxspec.errors import ConfigError
from jaxspec.models.catalog import arch_of
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import Policy, policy_for
from jaxspec.protocol import Drafter

BLOCK = 128
STATE = 2  # place of the donated state among the arguments of every program


@dataclass(frozen=True)
class Setting:
    """For what the programs of a model are made.

    Attributes:
      config: published config.
      rows: batch slots.
      capacity: longest text in tokens.
      drafts: K.
      kernels: see ``Policy.kernels``.
      mesh: devices that parameters are split over, None for one device.
      transport: see ``Policy.transport``.
      bucket: tokens of a prefill chunk.
      steps: most steps per dispatch.
    """

    config: Mapping[str, Any]
    rows: int = 4
    capacity: int = 4096
    drafts: int = 3
    kernels: str = "triton"
    mesh: AbstractMesh | None = None
    transport: Literal["sum", "padded", "ragged"] = "sum"
    bucket: int = 256
    steps: int = 8


@dataclass(frozen=True)
class Program:
    """A function and the shapes that it is compiled for.

    Attributes:
      call: the function.
      arguments: shapes and dtypes; the third is the state, which is donated.
      positions: that the target verifies per row and step; 0 for a prefill.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    positions: int


def programs(setting: Setting, wanted: tuple[str, ...] = ()) -> dict[str, Program]:
    """Programs by name: ``plain``, one per drafter that the config allows (``ngram``, ``mtp``), and ``prefill``.

    Args:
      setting: shapes.
      wanted: names; all by default.

    Raises:
      ConfigError: the config is not supported, or lacks what is wanted.
    """
    target, behind = _target(setting)
    drafters: dict[str, Drafter] = {"plain": NoDrafts()}
    for method in ("ngram", "mtp"):
        asked = catalog.parse({"method": method, "num_speculative_tokens": setting.drafts})
        if method != "mtp" or behind is not None:
            drafters[method] = catalog.build(asked, (target.net, target.params), BLOCK, behind)
    known = (*drafters, "prefill")
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise ConfigError(f"programs {', '.join(unknown)} are not known for this model; known are {', '.join(known)}")
    made = {name: _step(setting, target, drafter) for name, drafter in drafters.items()}
    made["prefill"] = _prefill(setting, target, drafters["mtp" if behind else "ngram"])
    return {name: made[name] for name in wanted or known}


def abstract_target(config: Mapping[str, Any], policy: Policy) -> Target:
    """A model by its config alone, quantised as it is published, its parameters shapes and dtypes."""
    arch = arch_of(config)
    table = known_tables()[arch.family]
    plan = _plan(config, Transformer(arch, policy), table.rules(arch))
    return Target({"params": unflatten(plan.leaves)}, Transformer(arch, plan.policy), BLOCK)


def _target(setting: Setting) -> tuple[Target, tuple[Mtp, Any] | None]:
    policy = policy_for("bfloat16", "gpu", setting.kernels)
    policy = replace(policy, own_head=False, mesh=setting.mesh, transport=setting.transport)
    policy = replace(policy, depth="unrolled" if policy.splits_rows else policy.depth)
    target = abstract_target(setting.config, policy)
    arch = target.net.arch
    if not arch.mtp:
        return target, None
    plan = _plan(setting.config, Mtp(arch, policy), known_tables()[arch.family].mtp_rules(arch))
    return target, (Mtp(arch, plan.policy), {"params": unflatten(plan.leaves)})


def _plan(config: Mapping[str, Any], net: Any, rules: Any) -> Plan:
    return make_plan(Path("config.json"), net, rules, block=check_method(config), files=promised(config))


def _step(setting: Setting, target: Target, drafter: Drafter) -> Program:
    plan = StepPlan(steps=setting.steps)
    state = _state(setting, target, drafter)
    arguments = (target, drafter, state, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_))
    return Program(partial(dispatch, plan=plan), arguments, drafter.topology.nodes)


def _prefill(setting: Setting, target: Target, drafter: Drafter) -> Program:
    whole = jax.ShapeDtypeStruct((), jnp.int32)
    chunk = jax.ShapeDtypeStruct((setting.bucket + 1,), jnp.int32)
    return Program(prefill, (target, drafter, _state(setting, target, drafter), whole, chunk, whole, whole), 0)


def _state(setting: Setting, target: Target, drafter: Drafter) -> Any:
    slack = max(drafter.topology.nodes, drafter.slack, setting.bucket)
    return jax.eval_shape(lambda: init_state(target, drafter, setting.rows, setting.capacity, slack=slack))


def size_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree of shapes."""
    return sum(int(np.prod(x.shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
