"""Reports of programs compiled for GPUs: launches, CUDA graphs, collectives, memory, copies and spills of a step."""

import contextlib
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.aot import hlo, launches, process
from jaxspec.aot.programs import STATE, Program, ProgramSettings, programs, shortened
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.shardings import named_shardings
from jaxspec.pytree import replace
from jaxspec.sharding.compiler_options import compiler_options
from jaxspec.sharding.mesh import make_mesh
from jaxspec.sharding.placement import row_axes, state_rules, state_shardings
from jaxspec.sharding.targets import target_context, target_devices
from pallas_kernels import blocks

COLLECTIVE = re.compile(r"^(ragged-all-to-all|all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute)")
BIG_BYTES = 1 << 20


def compile_for(
    function: Any, arguments: tuple[Any, ...], devices: Sequence[Any], *, name: str, donate: tuple[int, ...] = (),
    shardings: Any = None,
) -> Any:  # fmt: skip
    """Compiles a function for devices that need not be there.

    Args:
      function: takes arrays or trees of them.
      arguments: their shapes and dtypes.
      devices: see ``target_devices``.
      name: by which XLA's dumps are found again.
      donate: places of the arguments that are updated in place.
      shardings: of the arguments; replicated by default.
    """
    replicated = NamedSharding(Mesh(list(devices)[:1], ("x",)), PartitionSpec())
    placed = shardings or jax.tree.map(lambda _: replicated, arguments)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arguments, placed)

    def call(*given: Any) -> Any:
        return function(*given)

    call.__name__ = name
    context = target_context(devices) if len(devices) == 1 else contextlib.nullcontext()
    with blocks.on_card(devices[0].device_kind), context:
        return jax.jit(call, donate_argnums=donate).lower(*shapes).compile(compiler_options("gpu"))


def report_programs(
    config: Mapping[str, Any], *, gpu: str = "h100", devices: int = 1, mesh: Mapping[str, int] | None = None,
    wanted: Sequence[str] = (), layers: int = 0, **setting: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compiles the programs of a model and reports what they do; to be called through ``process.run``.

    Args:
      config: published config.
      gpu: name of a description in ``configs/hardware/targets``.
      devices: how many of them; from 9 on in machines of eight.
      mesh: devices by axis; all along ``expert`` by default, or along ``tensor`` where the model has no experts.
      wanted: names of programs, all by default.
      layers: how many are compiled, 0 for all; weights, caches and state are those of all in any case.
      **setting: see ``ProgramSettings``.
    """
    if devices > 8 and devices % 8:
        raise ConfigError(f"devices: up to 8, or whole machines of 8, got {devices}")
    hosts, devices_per_host = (1, devices) if devices <= 8 else (devices // 8, 8)
    targets = target_devices(process.target_text(gpu), hosts, devices_per_host)
    short = shortened(config, layers) if layers else config
    arch = arch_of(short)
    chosen = make_mesh(mesh or {"expert" if arch.is_moe else "tensor": devices}, targets)
    over = chosen.abstract_mesh if devices > 1 else None
    made = programs(ProgramSettings(short, mesh=over, **setting), tuple(wanted))
    reports = {name: _report(name, program, chosen, arch) for name, program in made.items()}
    for name, program in (
        programs(ProgramSettings(config, mesh=over, **setting), tuple(wanted)).items() if layers else ()
    ):
        reports[name]["bytes"] |= _resident_bytes(program, _shardings(program, chosen))
    sizes = {axis: int(size) for axis, size in chosen.shape.items()}
    settings = {k: v for k, v in vars(ProgramSettings(config, **setting)).items() if k not in ("config", "mesh")}
    return {"gpu": targets[0].device_kind, "devices": devices, "mesh": sizes, **settings, "programs": reports}


def _report(name: str, program: Program, mesh: Mesh, arch: ArchSpec) -> dict[str, Any]:
    """Compiles one program and looks at it.

    Returns:
      ``launches``, ``graphs``, ``kernels``, ``collectives``, ``bytes``, ``copies``, ``spills`` and ``compile_s``; see
      the README. Bytes are those of one device.
    """
    # The log is of the process: what earlier programs spilled is not this one's.
    began, before, placed = time.monotonic(), set(process.spills()), _shardings(program, mesh)
    compiled = compile_for(
        program.call, program.arguments, list(mesh.devices.flat), name=name, donate=(STATE,), shardings=placed
    )
    compile_s = time.monotonic() - began
    module = hlo.parse(compiled.as_text(), stepped=program.positions > 0)
    listing = launches.parse(
        process.dump_file(name, "thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt"),
        process.dump_file(name, "thunk_metadata.txt"),
        module,
    )
    spilled = {kernel: size for kernel, size in process.spills().items() if kernel not in before}
    moe = sum(isinstance(layer.ffn, MoeSpec) for layer in arch.layers)
    return {
        "positions": program.positions,
        "launches": {
            "per_step": listing.per_step(),
            "in_branches": listing.in_branches(),
            "per_turn": listing.per_turn(),
            "by_group": dict(listing.by_group()),
            "per_position": round(listing.per_step() / max(program.positions, 1), 1),
        },
        "graphs": {
            "per_step": listing.graphs_per_step(),
            "launches_outside": listing.outside_graphs(),
            "host_waits": listing.waits_per_step(),
        },
        "kernels": dict(listing.by_kernel().most_common()),
        "shared_bytes": _shared(listing),
        "collectives": collectives_of(module, moe),
        "bytes": _memory(compiled, program, placed),
        "copies": copies_of(module),
        "spills": spilled,
        "compile_s": round(compile_s, 1),
    }


def _shardings(program: Program, mesh: Mesh) -> Any:
    """Shards parameters and state by their names' letters, and replicates everything else."""
    replicated = NamedSharding(mesh, PartitionSpec())
    placed = list(jax.tree.map(lambda _: replicated, program.arguments))
    state, policy = program.arguments[STATE], program.arguments[0].net.policy
    over = row_axes(mesh, state.length_B.shape[0], spread=policy.compute.transport != "sum")
    placed[STATE] = state_shardings(state, mesh, state_rules(over, own_pages=policy.layout.depth == "unrolled"))
    for i, argument in enumerate(program.arguments[:STATE]):
        split_names = [name for name in ("params", "base") if hasattr(argument, name)]
        split = {name: named_shardings(getattr(argument, name), mesh, allow_replication=True) for name in split_names}
        placed[i] = replace(placed[i], **split)
    return tuple(placed)


def _shared(listing: launches.Launches) -> dict[str, int]:
    """Returns the most shared memory that a program of each kernel asks for."""
    most: dict[str, int] = {}
    for launch in listing.all:
        if launch.shared_bytes:
            most[launch.name] = max(most.get(launch.name, 0), launch.shared_bytes)
    return dict(sorted(most.items(), key=lambda item: -item[1]))


def collectives_of(module: hlo.Module, moe_layers: int = 1) -> dict[str, dict[str, float]]:
    """Returns how often each collective runs, and its bytes."""
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for instruction, run in module.executed():
        kind = COLLECTIVE.match(instruction.opcode)
        if kind and not run.setup and not instruction.opcode.endswith("-done"):
            count[kind[1]] += run.times
            size[kind[1]] += run.times * sum(hlo.array_bytes(*array) for array in instruction.arrays)
    return {
        kind: {"per_step": n, "per_moe_layer": round(n / max(moe_layers, 1), 2), "bytes_per_step": size[kind]}
        for kind, n in count.items()
    }


def _memory(compiled: Any, program: Program, placed: Any) -> dict[str, int]:
    """Returns bytes on one device. Arguments count a shared embedding and head twice."""
    analysis = compiled.memory_analysis()
    return {
        "arguments": analysis.argument_size_in_bytes,
        "temp": analysis.temp_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        **_resident_bytes(program, placed),
    }


def _resident_bytes(program: Program, placed: Any) -> dict[str, int]:
    """Returns the bytes of weights and state on one device."""
    both = list(zip(program.arguments, placed, strict=True))
    weights = [(one.params, where.params) for one, where in both[:STATE] if hasattr(one, "params")]
    state, where = both[STATE]
    return {
        "weights": sum(_device_bytes(tree, where) for tree, where in weights),
        "caches": _device_bytes(state.layers, where.layers),
        "state": _device_bytes(state, where),
    }


def _device_bytes(tree: Any, placed: Any) -> int:
    """Returns the bytes of all arrays of a tree of shapes that lie on each device."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(placed), strict=True)
    return sum(math.prod(where.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x, where in pairs)


def copies_of(module: hlo.Module) -> list[dict[str, Any]]:
    """Returns big arrays that are written again although they are in memory, the worst first."""
    entries: dict[tuple[str, ...], dict[str, Any]] = {}
    for instruction, run in hlo.copies(module, BIG_BYTES):
        shape = re.sub(r"\{[^}]*\}", "", instruction.result)
        source = re.search(r'op_name="([^"]*)"', instruction.rest)
        where = re.sub(r"^jit\(\w+\)/(while/body/)?(closed_call/)?", "", source[1]) if source else ""
        key = (shape, where, str(run.optional), str(run.looped))
        entry = entries.setdefault(key, {
            "result": shape, "bytes": instruction.size_bytes, "times": 0, "optional": run.optional,
            "looped": run.looped, "setup": run.setup, "where": where, "name": instruction.name,
        })  # fmt: skip
        entry["times"] += run.times
    return sorted(entries.values(), key=lambda entry: -entry["bytes"] * entry["times"])
