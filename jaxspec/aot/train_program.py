"""The update of a head at a model's real shapes, with nothing allocated, compiled for GPUs that need not be there."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.aot import hlo, process
from jaxspec.aot.program_report import collectives_of, copies_of
from jaxspec.aot.programs import abstract_target, shortened
from jaxspec.checkpoint.load.model import policy_on_mesh
from jaxspec.errors import ConfigError
from jaxspec.nn.policy import policy_for
from jaxspec.nn.shardings import named_shardings
from jaxspec.pytree import replace
from jaxspec.sharding.axis_rules import REPLICABLE
from jaxspec.sharding.mesh import make_mesh
from jaxspec.sharding.targets import target_context, target_devices
from jaxspec.train.batch import Batch, rows_over
from jaxspec.train.head_nets import net_of, token_map_of
from jaxspec.train.head_run import loss_fn
from jaxspec.train.head_start import head_policy, init_params
from jaxspec.train.objective import HeadObjective, cut_product
from jaxspec.train.optimizer import optimizer_of
from jaxspec.train.settings import RunSettings, load_run_settings
from jaxspec.train.update import TrainState, make_update, state_shardings

HOST_DEVICES = 8
Arguments = tuple[TrainState, HeadObjective, Batch]


def arguments_of(settings: RunSettings, config: Mapping[str, Any], mesh: Mesh) -> Arguments:
    """Returns state, objective and batch of a run on a mesh, as shapes, dtypes and shardings."""
    t, several = settings.train, mesh if mesh.size > 1 else None
    target = abstract_target(config, policy_on_mesh(policy_for(t.target_dtype, "gpu"), several))
    base: Any = target.net
    net = net_of(settings.head, base.arch, config, head_policy(t, "gpu"))
    params = jax.eval_shape(lambda: init_params(net, jax.random.key(0)))
    map_W = token_map_of(settings.loss, net, base.arch.vocab_size)
    width = getattr(getattr(net, "spec", None), "draft_vocab", 0) if map_W is None else len(map_W)
    ids: Any = jax.ShapeDtypeStruct((width,), jnp.int32) if 0 < width < base.arch.vocab_size else None
    few = settings.loss.draft_only or map_W is not None
    product = jax.eval_shape(cut_product, target.params, ids if few else None)
    objective = HeadObjective(
        target.params, ids, base, net, settings.loss, remat=bool(t.remat), product=product, vocabulary=t.vocabulary
    )
    optimizer = optimizer_of(settings.optimizer, t.steps, vocabulary=t.vocabulary)
    moments = jax.eval_shape(optimizer.init, params)
    token: Any = jax.ShapeDtypeStruct((t.accumulation, t.rows, settings.data.length), jnp.int32)
    truth: Any = jax.ShapeDtypeStruct(token.shape, bool)
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(None, rows_over(mesh, t)))
    product_split = None if product is None else named_shardings(product, mesh, allow_replication=True)
    places = replace(
        jax.tree.map(lambda _: whole, objective),
        target_params=named_shardings(target.params, mesh, allow_replication=REPLICABLE),
        product=product_split,
    )
    state, batch = TrainState(params, moments, number), Batch(token, token, token, truth)
    return (
        _placed(state, state_shardings(state, optimizer, mesh)),
        _placed(objective, places),
        _placed(batch, jax.tree.map(lambda _: rows, batch)),
    )


def _placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings)


def report_update(
    config: Mapping[str, Any], *, wanted: str, changes: Sequence[str], gpu: str = "h100", layers: int = 0
) -> dict[str, Any]:
    """Compiles one update and says what each device holds; to be called through ``process.run``.

    Args:
      config: published config of the target.
      wanted: see ``load_run_settings``.
      changes: likewise; ``mesh.expert=8`` and the like say which devices.
      gpu: name of a description in ``configs/hardware/targets``.
      layers: of the target that are compiled, 0 for all; what lies on a device is that of all in any case.

    Returns:
      Bytes of one device: ``weights`` of the frozen target, ``head``, ``state`` (head, moments and counters),
      ``arguments``, ``temp`` and ``results`` beyond the donated state; ``mesh``, ``copies`` of big arrays,
      ``collectives`` and ``compile_s``.

    Raises:
      ConfigError: the settings, the model or the devices are not usable.
    """
    settings = load_run_settings(wanted, changes)
    sizes = msgspec.structs.asdict(settings.mesh)
    count = math.prod(sizes.values())
    if count > HOST_DEVICES and count % HOST_DEVICES:
        raise ConfigError(f"mesh: up to 8 devices, or whole machines of 8, got {count}")
    hosts = max(count // HOST_DEVICES, 1)
    devices = target_devices(process.target_text(gpu), hosts, count // hosts)
    mesh, began = make_mesh(sizes, devices), time.monotonic()
    arguments = arguments_of(settings, shortened(config, layers) if layers else config, mesh)
    parts, places = settings.train.rows // (settings.train.micro_rows or settings.train.rows), None
    if count > 1:
        places = jax.tree.map(lambda x: x.sharding, arguments[0])
    optimizer = optimizer_of(settings.optimizer, settings.train.steps, vocabulary=settings.train.vocabulary)
    update: Any = make_update(loss_fn, optimizer, settings.seed, places, parts)
    with target_context(devices) if count == 1 else contextlib.nullcontext():
        compiled = update.lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    state, objective, _ = arguments_of(settings, config, mesh) if layers else arguments
    module = hlo.parse(compiled.as_text(), stepped=False)
    return {
        "gpu": gpu, "devices": count, "mesh": sizes, "length": settings.data.length,
        "rows": settings.train.rows // parts, "rounds": settings.loss.rounds,
        "weights": device_bytes(objective.target_params), "head": device_bytes(state.params),
        "state": device_bytes(state), "arguments": analysis.argument_size_in_bytes, "temp": analysis.temp_size_in_bytes,
        "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "copies": copies_of(module), "collectives": collectives_of(module),
        "compile_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def device_bytes(tree: Any) -> int:
    """Returns the bytes of all placed shapes of a tree that lie on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
