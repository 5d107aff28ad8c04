"""Computes what one update of a head takes: memory, products and predicted time, from published configs alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec
from jax.sharding import AbstractMesh, AxisType

from jaxspec.aot.programs import target_plan
from jaxspec.checkpoint.load.model import policy_on_mesh
from jaxspec.checkpoint.load.places import flatten
from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.inspect.model_cost import model_cost
from jaxspec.models.arch import ArchSpec, MixerSpec, chosen_of, experts_of
from jaxspec.models.block_head import BlockHead
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.nn.param import declared
from jaxspec.nn.policy import policy_for
from jaxspec.perf.cost import Mesh, ModelCost, Rates, works
from jaxspec.perf.hardware import Hardware, hardware_of
from jaxspec.perf.overlap import AssumedOverlap
from jaxspec.perf.pass_time import smooth_max, step_time
from jaxspec.train.fit import work_of
from jaxspec.train.head_start import init_params
from jaxspec.train.memory import GB, MemoryPlan, UpdateWork, layers_of, plan_memory
from jaxspec.train.objective import Net
from jaxspec.train.settings import RunSettings
from jaxspec.train.target import TargetHeaders
from jaxspec.train.vocab_loss import default_positions, position_bytes

MOMENT_PASSES = 7  # over the head's parameters: AdamW reads four arrays of their size, and writes three


@dataclass(frozen=True)
class UpdatePlan:
    """What one update takes.

    Attributes:
      memory: of one device, and how many rows are computed together.
      flops: products of all devices by cause; what is computed again for gradients does not count.
      seconds: predicted, by cause, with the likely ones of the record's assumed efficiencies.
      range_s: from its high to its low ones.
      tokens: of one update.
      mfu: share of the devices' peak of bfloat16 products that ``flops`` are in that time.
    """

    memory: MemoryPlan
    flops: Mapping[str, float]
    seconds: Mapping[str, float]
    range_s: tuple[float, float]
    tokens: int
    mfu: float

    @property
    def time_s(self) -> float:
        """Seconds of an update."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens that are trained on in a second, by all devices."""
        return self.tokens / self.time_s


def update_work(settings: RunSettings, config: Mapping[str, Any]) -> UpdateWork:
    """Returns what an update of a target's published config computes on GPUs; raises ConfigError."""
    sizes = msgspec.structs.asdict(settings.mesh)
    several = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    mesh: Any = several if several.size > 1 else None
    policy = policy_on_mesh(policy_for(settings.train.target_dtype, "gpu"), mesh)
    return work_of(settings, TargetHeaders(config, target_plan(config, policy)), mesh, "gpu")


def plan_update(settings: RunSettings, config: Mapping[str, Any], hardware: Hardware) -> UpdatePlan:
    """Plans an update of a head for a target's published config on devices that need not be there.

    Args:
      settings: of the run; ``settings.mesh`` says how many devices.
      config: of the target.
      hardware: each device's record.

    Raises:
      ConfigError: the settings do not suit the target or the mesh, or a single row does not fit.
    """
    work, model, mesh = update_work(settings, config), model_cost(config), Mesh(**msgspec.structs.asdict(settings.mesh))
    mesh.check(model)
    asked = settings.train.memory_gb
    room = hardware.memory_bytes * hardware.assumed.usable_memory if asked is None else asked * GB
    memory = plan_memory(work, settings.train, int(room))
    flops = update_flops(work, model, settings)
    likely, high, low = (
        _seconds(work, model, settings, memory, flops, hardware.rates(speed, slow), mesh)
        for speed, slow in (("likely", "likely"), ("high", "low"), ("low", "high"))
    )
    peak = mesh.devices * hardware.bf16_tflops * 1e12
    tokens = settings.train.rows * settings.train.accumulation * work.length
    mfu = sum(flops.values()) / (peak * sum(likely.values()))
    return UpdatePlan(memory, flops, likely, (sum(high.values()), sum(low.values())), tokens, mfu)


def seconds_at_peak(settings: RunSettings, config: Mapping[str, Any]) -> float:
    """Returns the seconds of an update at the peak of this machine's GPUs, 0 where record or model are not known."""
    device = jax.devices()[0]
    hardware = hardware_of(device.device_kind, shipped("hardware")) if device.platform == "gpu" else None
    if hardware is None:
        return 0.0
    try:
        flops = update_flops(update_work(settings, config), model_cost(config), settings)
    except ConfigError:  # a directory can be trained on whose published config alone does not say all of it
        return 0.0
    devices = math.prod(msgspec.structs.asdict(settings.mesh).values())
    return sum(flops.values()) / (devices * hardware.bf16_tflops * 1e12)


def update_flops(work: UpdateWork, model: ModelCost, settings: RunSettings) -> dict[str, float]:
    """Counts products of one update by cause: of the target as plans of serving do, of the head by its parameters.

    A product of the head is computed once forward and twice for gradients; what maps the target's vectors to the head's
    width, and a vocabulary product that is not trained, once. A row is taken as one text.
    """
    t, rows = settings.train, settings.train.rows * settings.train.accumulation
    places, net, width = rows * work.length, work.net, work.width
    passes = works(model, rows=rows, positions=work.length, context=work.length // 2, head_positions=0)
    target = 0.0 if settings.features.cache else sum(x.count * x.flops for x in passes)
    some = width / work.arch.vocab_size
    share = some if work.loss.draft_only or work.loss.token_map else 1.0
    arch = _trained(net)
    sizes = _factors(net, chosen_of(arch) / max(experts_of(arch), 1) if arch else 1.0)
    own = sum(size for path, size in sizes.items() if path.endswith(("head_DW", "head_DV")))
    if isinstance(net, Transformer) and not own:  # tied
        own = sizes["head_DV"] = net.arch.vocab_size * net.arch.model_dim
    once = sum(size for path, size in sizes.items() if path.endswith("fc_XD"))
    each = sum(sizes.values()) - own - once
    slots, drafts = _slots(work, rows)
    vocabulary = (2.0 * own if own else model.head_flops) * (some if work.loss.token_map else 1.0)
    layers = arch.layers if arch else ()
    attention = sum(_flops_per_key(layer.attention) * work.length / 2 for layer in layers)
    forward = 2.0 * once * places + slots * (2.0 * each + attention)
    backward = 2.0 * once * places + 2 * slots * (2.0 * each + attention)
    return {
        "target": target,
        "target's vocabulary": (drafts if isinstance(net, BlockHead) else places) * share * model.head_flops,
        "head": forward + backward,
        "head's vocabulary": drafts * vocabulary * (3 if own and t.vocabulary else 2),
    }


def _trained(net: Net) -> ArchSpec | None:
    """Returns the architecture of what is trained, with the layers that a round runs; None where it has none."""
    if isinstance(net, Mtp):
        return replace(net.arch, layers=layers_of(net))
    return None if isinstance(net, Medusa) else net.arch if isinstance(net, Transformer) else net.spec.arch


def _flops_per_key(mixer: MixerSpec) -> float:
    """Returns the products of one query of all heads with one key and value."""
    if isinstance(mixer, LatentSpec):
        return 2.0 * mixer.heads * (2 * mixer.rank + mixer.rope.dim)
    return 4.0 * mixer.heads * mixer.head_dim if isinstance(mixer, AttentionSpec) else 0.0


def _factors(net: Any, chosen: float) -> dict[str, float]:
    """Counts the parameters that are factors of a position's products, of experts the ``chosen`` share."""
    leaves = flatten(jax.eval_shape(lambda: init_params(net, jax.random.key(0)))["params"])
    return {
        path: math.prod(leaf.shape) * (chosen if declared(path).part == "routed experts" else 1.0)
        for path, leaf in leaves.items()
        if len(leaf.shape) > 1 and not path.endswith(("embed_VD", "part_norm_XD"))
    }


def _slots(work: UpdateWork, rows: int) -> tuple[float, float]:
    """Returns how often the head's layers run, and its vocabulary product."""
    net, places = work.net, rows * work.length
    if isinstance(net, BlockHead):
        blocks = rows * min(work.loss.block.anchors, work.length)
        return blocks * net.spec.block_size, blocks * net.spec.drafts
    if not isinstance(net, DraftHead | Mtp):
        return places, places
    if isinstance(net, Mtp) or net.spec.mask_token is None:
        return places * work.loss.rounds, places * work.loss.rounds
    # The loss walks over all positions in every round, those that were not drawn with weight 0.
    return rows * (work.length + sum(work.loss.counts(work.length))), places * work.loss.rounds


def _seconds(
    work: UpdateWork, model: ModelCost, settings: RunSettings, memory: MemoryPlan, flops: Mapping[str, float],
    rates: Rates, mesh: Mesh,
) -> dict[str, float]:  # fmt: skip
    """Predicts the time of one update by cause, on the slowest device."""
    passes, local = memory.parts * settings.train.accumulation, memory.rows // work.devices
    # Where the mesh does not divide the rows, devices along ``expert`` compute the same ones.
    rows = memory.rows * (mesh.data * mesh.expert // work.devices)
    target = step_time(
        model, rates, rows=rows, positions=work.length, context=work.length // 2, mesh=mesh,
        overlap=AssumedOverlap(1.0), head_positions=0,
    ).total_s  # fmt: skip
    rounds = work.loss.rounds if isinstance(work.net, DraftHead | Mtp) else 1
    some = default_positions(memory.rows, work.length, model.vocab_size, work.width, rounds)
    chunks, wide = -(-work.length // some), 4.0 * work.arch.model_dim * work.width
    logits = 2.0 * local * work.length * position_bytes(model.vocab_size, work.width, rounds)
    # Of each chunk: the target's product; the head's, narrowed and read twice; a gradient, written and then added.
    read = chunks * (model.head_bytes + 6.5 * wide) + logits
    products = (flops["target's vocabulary"] + flops["head's vocabulary"]) / work.devices
    head = flops["head"] * (4 / 3 if memory.remat else 1.0) / work.devices
    sent = passes * wide * 2 * (1 - 1 / work.devices)
    return {
        "target": 0.0 if settings.features.cache else passes * target,
        "vocabulary": smooth_max(passes * read * rates.byte_s, products * rates.flop_s),
        "head": head * rates.flop_s,
        "sums of the vocabulary's gradient": sent * rates.link_byte_s if work.devices > 1 else 0.0,
        "optimizer": MOMENT_PASSES * work.head_bytes * rates.byte_s,
    }
