"""Every case of every kernel, found by discovery, and compiled for a GPU that need not be there."""

import time
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pallas_kernels
from jaxspec.aot import hlo, launches, mosaic, process
from jaxspec.aot.program_report import compile_for
from jaxspec.sharding.targets import target_devices
from pallas_kernels.backend import Implementation
from pallas_kernels.case import Case


def operations() -> list[str]:
    """Returns the names of all operations: the folders of ``pallas_kernels``."""
    return sorted(module.name for module in iter_modules(pallas_kernels.__path__) if module.ispkg)


def cases_of(op: str) -> tuple[Case, ...]:
    """Cases of one operation."""
    return import_module(f"pallas_kernels.{op}.cases").CASES


def compile_cases(
    op: str, *, gpu: str = "h100", names: Sequence[str] | None = None, by: Implementation = "triton"
) -> dict[str, dict[str, Any]]:
    """Compiles cases of one operation; to be called through ``process.run``.

    Args:
      op: name of its folder.
      gpu: name of a description in ``configs/hardware/targets``.
      names: of the cases, all by default.
      by: ``triton``, or ``mosaic`` for the cases that it computes, too.

    Returns:
      By case ``error`` (None if it compiled), ``launches``, ``shared_bytes``, ``temp_bytes`` and ``compile_s``, and
      ``kernels``, those of Mosaic GPU, see ``mosaic.reports``.
    """
    devices = target_devices(process.target_text(gpu))
    cases = [case for case in cases_of(op) if names is None or case.name in names]
    return {case.name: _compiled(case, by, devices) for case in cases if case.mosaic or by != "mosaic"}


def _compiled(case: Case, by: Implementation, devices: list[Any]) -> dict[str, Any]:
    began, name = time.monotonic(), f"case_{case.name}"
    try:
        compiled = compile_for(case.call(by), case.abstract(), devices, name=name)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    listing = process.dump_file(name, "thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt")
    module = hlo.parse(compiled.as_text(), stepped=False)
    listed = launches.parse(listing, process.dump_file(name, "thunk_metadata.txt"), module)
    return {
        "error": None,
        "launches": dict(listed.by_kernel()),
        "shared_bytes": max((launch.shared_bytes for launch in listed.all), default=0),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "compile_s": round(time.monotonic() - began, 2),
        "kernels": mosaic.reports(),
    }
