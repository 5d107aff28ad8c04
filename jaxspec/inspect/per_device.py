"""What each device of a mesh holds to run a model's compiled programs, and what devices exchange."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.aot import process
from jaxspec.aot.programs import shortened
from jaxspec.checkpoint.load.stored import quantization_of
from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.nn.moe import MoeSpec
from jaxspec.perf.hardware import load_hardware

EXCHANGES = ("ragged-all-to-all", "all-to-all")


def per_device(
    config: Mapping[str, Any], hardware: str, *, mesh: Mapping[str, int] | None = None, drafts: int = 3,
    quantization: str = "auto", layers: int = 0, wanted: Sequence[str] = (), **setting: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compiles a model's programs for devices that need not be there, and adds up what lies on each.

    Args:
      config: published config.
      hardware: device and how many, ``h200x16``; more than eight are machines of eight.
      mesh: devices by axis; all along ``expert``, or ``tensor`` without experts, by default.
      drafts: K.
      quantization: of a model whose config says nothing of it; others lie as published.
      layers: how many are compiled, 0 for all; what lies on a device is that of all in any case.
      wanted: programs; plain decoding, the model's best own drafter and prefill by default.
      **setting: see ``jaxspec.aot.programs.ProgramSettings``.

    Returns:
      Bytes of one device: ``weights`` of target and drafter, ``caches``, other ``state``, the most ``temp`` of a
      program, ``total``, and ``room``, the share of the memory that may be used; whether it ``fits``; by program,
      ``exchanges`` per expert layer that runs, other ``collectives`` per step, ``arguments`` and ``temp``.

    Raises:
      ConfigError: config, hardware or mesh are not usable, or something does not compile.
    """
    card, count = load_hardware(hardware, shipped("hardware"))
    arch = arch_of(shortened(config, layers) if layers else config)
    drafter = "mtp" if arch.mtp else "ngram"
    compiled = process.run(
        "jaxspec.aot.program_report:report_programs", config=config, gpu=hardware.partition("x")[0], devices=count,
        mesh=mesh, drafts=drafts, quantization="auto" if quantization_of(config) else quantization,
        wanted=wanted or ("plain", drafter, "prefill"), layers=layers, timeout_s=7200, **setting,
    )  # fmt: skip
    programs = {name: _program(name, entry, arch, drafts) for name, entry in compiled["programs"].items()}
    sizes = [entry["bytes"] for entry in compiled["programs"].values()]
    # Plain decoding has no drafter's weights and state, and a prefill's are those of the drafter's step.
    most = {name: max(size[name] for size in sizes) for name in ("weights", "caches", "state", "temp")}
    total, room = most["weights"] + most["state"] + most["temp"], int(card.memory_bytes * card.assumed.usable_memory)
    return {
        "hardware": card.name, "devices": count, "compiled_layers": len(arch.layers),
        **{name: compiled[name] for name in ("mesh", "transport", "rows", "capacity", "drafts")},
        **most, "state": most["state"] - most["caches"], "total": total, "memory": int(card.memory_bytes),
        "room": room, "fits": total <= room, "programs": programs,
    }  # fmt: skip


def train_per_device(
    config: Mapping[str, Any], hardware: str, *, wanted: str, changes: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None, layers: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Compiles one update of a head for devices that need not be there, and adds up what lies on each.

    Args:
      config: published config of the target.
      hardware: device and how many, ``h200x8``.
      wanted: a training config, a name in ``configs/train`` or a file.
      changes: of it, ``train.rows=16`` and the like.
      mesh: devices by axis; all along ``expert``, or ``tensor`` without experts, by default.
      layers: how many are compiled, 0 for all; what lies on a device is that of all in any case.

    Returns:
      As ``per_device``, with ``weights`` of the target, ``state`` of head and optimizer, no ``caches``, and ``length``,
      ``rows`` that are computed together, ``rounds``.

    Raises:
      ConfigError: config, settings, hardware or mesh are not usable, or something does not compile.
    """
    card, count = load_hardware(hardware, shipped("hardware"))
    arch = arch_of(shortened(config, layers) if layers else config)
    sizes = mesh or ({"expert" if arch.is_moe else "tensor": count} if count > 1 else {})
    if (devices := math.prod(sizes.values())) != count:
        raise ConfigError(
            f"mesh: it has {devices} devices, {hardware} has {count}; give sizes whose product is {count}"
        )
    compiled = process.run(
        "jaxspec.aot.train_program:report_update", config=config, wanted=wanted,
        changes=[*changes, *(f"mesh.{axis}={size}" for axis, size in sizes.items())], gpu=hardware.partition("x")[0],
        layers=layers, timeout_s=7200,
    )  # fmt: skip
    total = compiled["weights"] + compiled["state"] + compiled["temp"] + compiled["results"]
    room = int(card.memory_bytes * card.assumed.usable_memory)
    program = {
        "expert_layers": sum(isinstance(layer.ffn, MoeSpec) for layer in arch.layers), "exchanges": 0,
        "collectives": {kind: x["per_step"] for kind, x in compiled["collectives"].items()},
        "collective_bytes": {kind: x["bytes_per_step"] for kind, x in compiled["collectives"].items()},
        **{name: compiled[name] for name in ("arguments", "temp", "compile_s")},
    }  # fmt: skip
    return {
        "hardware": card.name, "devices": count, "compiled_layers": len(arch.layers),
        **{name: compiled[name] for name in ("mesh", "rows", "length", "rounds", "weights", "state", "temp")},
        "caches": 0, "total": total, "memory": int(card.memory_bytes), "room": room, "fits": total <= room,
        "programs": {"train": program},
    }  # fmt: skip


def _program(name: str, entry: Mapping[str, Any], arch: ArchSpec, drafts: int) -> dict[str, Any]:
    """Returns what one program sends; the predicting layer runs once per draft, the last time to observe."""
    runs = sum(isinstance(layer.ffn, MoeSpec) for layer in arch.layers)
    if name == "mtp":
        runs += drafts * sum(isinstance(layer.ffn, MoeSpec) for layer in arch.mtp)
    count = {kind: exchange["per_step"] for kind, exchange in entry["collectives"].items()}
    return {
        "positions": entry["positions"],
        "expert_layers": runs,
        "exchanges": sum(count.get(kind, 0) for kind in EXCHANGES) / max(runs, 1),
        "collectives": {kind: n for kind, n in count.items() if kind not in EXCHANGES},
        "arguments": entry["bytes"]["arguments"],
        "temp": entry["bytes"]["temp"],
        "compile_s": entry["compile_s"],
    }
