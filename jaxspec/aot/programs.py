"""The programs of serving at a model's real shapes, with nothing allocated, to be traced or compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxspec.aot.head_programs import KINDS, drafter_of
from jaxspec.checkpoint.load.load_plan import LoadPlan, make_plan
from jaxspec.checkpoint.load.places import unflatten
from jaxspec.checkpoint.load.release import release_files
from jaxspec.checkpoint.load.stored import check_method
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.decode.dispatch import dispatch
from jaxspec.decode.prefill import Chunk, prefill
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import StepPlan
from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.models.cache_dtype import with_cache_dtype
from jaxspec.models.catalog import arch_of
from jaxspec.models.kv_copies import with_kv_copies
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import Policy, policy_for
from jaxspec.protocol import Drafter, NoDrafts

BLOCK = 128
STATE = 2  # place of the donated state among the arguments of every program


@dataclass(frozen=True)
class ProgramSettings:
    """What the programs of a model are made for.

    Attributes:
      config: published config.
      rows: batch slots.
      capacity: longest text in tokens.
      drafts: K.
      kernels: see ``policy_for``.
      mesh: devices that parameters are split over, None for one device.
      transport: see ``Compute.transport``.
      bucket: tokens of a prefill chunk.
      steps: most steps per dispatch.
      quantization: how weights lie in memory, see ``make_plan``.
      kv_cache_dtype: of ``LLM``.
    """

    config: Mapping[str, Any]
    rows: int = 4
    capacity: int = 4096
    drafts: int = 3
    kernels: str = "auto"
    mesh: AbstractMesh | None = None
    transport: Literal["sum", "padded", "ragged"] = "sum"
    bucket: int = 256
    steps: int = 8
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"


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


def programs(setting: ProgramSettings, names: tuple[str, ...] = ()) -> dict[str, Program]:
    """Returns programs by name: ``plain``, one per drafter, and ``prefill``.

    Args:
      setting: shapes.
      names: of the programs; by default all but those of heads, which are named as in ``configs/heads``.

    Raises:
      ConfigError: the config is not supported, or has no such program.
    """
    target, prediction = _target(setting)
    drafters: dict[str, Drafter] = {"plain": NoDrafts()}
    for method in ("ngram", "mtp"):
        asked = methods.parse({"method": method, "num_speculative_tokens": setting.drafts})
        if method != "mtp" or prediction is not None:
            drafters[method] = methods.build(asked, (target.net, target.params), BLOCK, prediction)
    known = (*drafters, "prefill")
    unknown = sorted(set(names) - {*known, *KINDS})
    if unknown:
        raise ConfigError(
            f"programs {', '.join(unknown)} are not known for this model; known are {', '.join((*known, *KINDS))}"
        )
    drafters |= {name: drafter_of(name, target, setting.config, setting.drafts) for name in names if name in KINDS}
    made = {name: _step(setting, target, drafter) for name, drafter in drafters.items()}
    made["prefill"] = _prefill(setting, target, drafters["mtp" if prediction else "ngram"])
    return {name: made[name] for name in names or known}


def shortened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the config of a model of the same width with fewer layers, at most one leading dense layer.

    Raises:
      ConfigError: it has not so many.
    """
    depth = config["num_hidden_layers"]
    if not 0 < layers <= depth:
        raise ConfigError(f"layers: from 1 to {depth}, got {layers}")
    with_prediction = depth + int(config.get("num_nextn_predict_layers") or 0)
    lists = {name: x for name, x in config.items() if isinstance(x, list) and len(x) in (depth, with_prediction)}
    short = dict(config) | {name: x[:layers] + x[depth:] for name, x in lists.items()} | {"num_hidden_layers": layers}
    if "first_k_dense_replace" in config:
        short["first_k_dense_replace"] = min(config["first_k_dense_replace"], 1)
    return short


def abstract_target(
    config: Mapping[str, Any], policy: Policy, quantization: str = "auto", kv_cache_dtype: str = "auto"
) -> Target:
    """Builds a model from its config alone; its parameters are shapes and dtypes."""
    plan = target_plan(config, policy, quantization, kv_cache_dtype)
    return Target({"params": unflatten(plan.leaves)}, plan.net, BLOCK)


def target_plan(
    config: Mapping[str, Any], policy: Policy, quantization: str = "auto", kv_cache_dtype: str = "auto"
) -> LoadPlan:
    """Plans how the files of a release of this config would be loaded."""
    arch = with_cache_dtype(with_kv_copies(arch_of(config), policy.compute), kv_cache_dtype)
    return _plan(config, Transformer(arch, policy), known_tables()[arch.family].rules(arch), quantization)


def _target(setting: ProgramSettings) -> tuple[Target, tuple[Mtp, Any] | None]:
    policy = policy_for("bfloat16", "gpu", setting.kernels)
    policy = policy.update(own_head=False, mesh=setting.mesh, transport=setting.transport)
    policy = policy.update(depth="unrolled" if policy.compute.splits_rows else policy.layout.depth)
    target = abstract_target(setting.config, policy, setting.quantization, setting.kv_cache_dtype)
    arch = target.net.arch
    if not arch.mtp:
        return target, None
    rules = known_tables()[arch.family].mtp_rules(arch)
    plan = _plan(setting.config, Mtp(arch, policy), rules, setting.quantization)
    return target, (plan.net, {"params": unflatten(plan.leaves)})


def _plan(config: Mapping[str, Any], net: Any, rules: Any, quantization: str) -> LoadPlan:
    files, block = release_files(config), check_method(config)
    return make_plan(Path("config.json"), net, rules, block=block, quantization=quantization, files=files)


def _step(setting: ProgramSettings, target: Target, drafter: Drafter) -> Program:
    plan = StepPlan(steps=setting.steps)
    state = _state(setting, target, drafter)
    number, flag = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    arguments = (target, drafter, state, number, flag, number)
    return Program(partial(dispatch, plan=plan), arguments, drafter.topology.nodes)


def _prefill(setting: ProgramSettings, target: Target, drafter: Drafter) -> Program:
    number_R: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    token_RX: Any = jax.ShapeDtypeStruct((1, setting.bucket + 1), jnp.int32)
    chunk = Chunk(number_R, token_RX, number_R, number_R)
    return Program(prefill, (target, drafter, _state(setting, target, drafter), chunk), 0)


def _state(setting: ProgramSettings, target: Target, drafter: Drafter) -> Any:
    slack = max(drafter.topology.nodes, drafter.slack, setting.bucket)
    return jax.eval_shape(lambda: init_state(target, drafter, setting.rows, setting.capacity, slack=slack))
