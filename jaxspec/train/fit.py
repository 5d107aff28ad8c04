"""Fits a run's updates into memory, from files' headers, before anything is loaded."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxspec.checkpoint.heads.directory import plan_head
from jaxspec.checkpoint.heads.identify import is_head
from jaxspec.checkpoint.load.model import read_config
from jaxspec.checkpoint.load.places import unflatten
from jaxspec.errors import JaxspecError
from jaxspec.models.catalog import arch_of
from jaxspec.models.mtp import Mtp
from jaxspec.models.prediction import one_layer_arch
from jaxspec.models.transformer import Transformer
from jaxspec.sharding import hosts
from jaxspec.train.batch import rows_over
from jaxspec.train.head_nets import net_of, token_map_of
from jaxspec.train.head_start import head_policy, init_params
from jaxspec.train.memory import GB, HOST_POSITIONS, MemoryPlan, UpdateWork, free_bytes, held_bytes, plan_memory
from jaxspec.train.objective import Net
from jaxspec.train.run_log import Notify
from jaxspec.train.settings import RunSettings, TrainSettings
from jaxspec.train.target import TargetHeaders
from jaxspec.whole_file import write_whole

FILE = "memory.json"


def fit(
    settings: RunSettings,
    target: TargetHeaders,
    mesh: Mesh | None,
    notify: Notify,
    *,
    trained: bool = True,
) -> MemoryPlan:
    """Chooses how the updates of a run are computed; a run that goes on computes as it began.

    Args:
      settings: of the run.
      target: its headers.
      mesh: devices that rows and parameters are split over.
      notify: receives what was chosen.
      trained: whether a run follows, whose directory keeps what was chosen.

    Raises:
      ConfigError: nothing fits, or the settings are not usable.
    """
    work, t = work_of(settings, target, mesh), settings.train
    file = Path(settings.out) / FILE

    def choose() -> dict[str, Any]:
        room = free_bytes() if t.memory_gb is None else int(t.memory_gb * GB)
        enough = HOST_POSITIONS if jax.default_backend() == "cpu" and work.devices == 1 else None
        plan = plan_memory(work, _as_begun(t, file), room, enough)
        if trained:
            _record(plan, file)
        return asdict(plan)

    plan = MemoryPlan(**hosts.run_on_leader(choose))
    notify({"memory": plan.words()})
    if plan.room is not None and plan.total > plan.room:
        notify({"warning": f"an update takes about {plan.total / GB:.1f} GB and {plan.room / GB:.1f} GB are free"})
    return plan


def _record(plan: MemoryPlan, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"micro_rows": plan.rows, "remat": plan.remat}) + "\n")
    except OSError as error:
        raise JaxspecError(f"{file}: cannot be written ({error.strerror})") from error


def _as_begun(settings: TrainSettings, file: Path) -> TrainSettings:
    """Returns the settings with what an interrupted run chose, so it goes on to the bit; explicit settings win."""
    asked = settings.micro_rows, settings.remat, settings.memory_gb
    if any(value is not None for value in asked) or not any((file.parent / "checkpoints").glob("[0-9]*")):
        return settings
    try:
        begun = msgspec.convert(json.loads(file.read_text(encoding="utf-8")), dict[str, int | bool])
        return msgspec.structs.replace(settings, micro_rows=int(begun["micro_rows"]), remat=bool(begun["remat"]))
    except (OSError, ValueError, KeyError, msgspec.ValidationError):
        return settings


def work_of(settings: RunSettings, target: TargetHeaders, mesh: Mesh | None, platform: str | None = None) -> UpdateWork:
    """Returns what an update computes on a platform, by default this machine's; else as ``fit``."""
    arch, net = target.arch, _network(settings, target)
    params = jax.eval_shape(lambda: init_params(net, jax.random.key(0)))
    # The last hidden state and the stream before its norm, what is asked for, and that once more side by side.
    parts = len(net.joins.taps) if isinstance(net, Mtp) else getattr(getattr(net, "spec", None), "parts", 0)
    vectors = 2 + 2 * parts
    map_W = token_map_of(settings.loss, net, arch.vocab_size)
    own = 0 if isinstance(net, Transformer | Mtp) else net.spec.draft_vocab
    width = (own or arch.vocab_size) if map_W is None else len(map_W)
    devices = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in rows_over(mesh, settings.train))
    sizes = held_bytes(unflatten(target.plan.leaves), mesh), held_bytes(params, mesh)
    widens = (platform or jax.default_backend()) == "cpu" or settings.train.compute_dtype == "float32"
    return UpdateWork(arch, net, settings.loss, settings.data.length, width, vectors, *sizes, devices, widens)


def _network(settings: RunSettings, target: TargetHeaders) -> Net:
    """Returns the network that is trained; of one that is trained further, only the headers are read."""
    head, policy = settings.head, head_policy(settings.train)
    if head.start is None:
        return net_of(head, target.arch, target.config, policy)
    directory = Path(head.start)
    own = read_config(directory)
    if not is_head(own) and head.kind == "mtp":
        return Mtp(one_layer_arch(target.config), policy)
    if is_head(own):
        return plan_head(directory, target.arch, policy).net
    return Transformer(arch_of(own), policy)
