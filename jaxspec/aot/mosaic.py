"""What kernels of Mosaic GPU became: it has a compiler and a ptxas of its own, of which XLA's reports know nothing."""

import re
from typing import Any

from jaxspec.aot import process

REGISTERS = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill (?:stores|loads)")
SHARED = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")
WARPGROUP_REGISTERS = re.compile(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)")
PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16\.f32\.bf16\.bf16)")
READ = "cp.async.bulk.tensor"
SERIALIZED = "wgmma.mma_async instructions are serialized"


def reports() -> dict[str, dict[str, Any]]:
    """Reports each kernel compiled in this process since the last call.

    Returns:
      By kernel ``target``, ``registers`` of a thread, ``warpgroup_registers`` that warpgroups change to,
      ``spilled_bytes``, ``shared_bytes``, ``products`` (shapes of its wgmma instructions), ``reads`` and ``writes``
      (TMA instructions in the code), and whether ptxas made products wait for each other, ``serialized``.
    """
    files = process.mosaic_files().items()
    return {kernel: _report(texts) for kernel, texts in files if "ptx" in texts}  # equal ones are compiled once


def _report(texts: dict[str, str]) -> dict[str, Any]:
    code, log = texts["ptx"], texts["ptxas"]
    target = re.search(r"^\.target (\w+)", code, re.MULTILINE)
    shared = SHARED.search(texts["log"])
    assert target is not None, "PTX names its target"
    return {
        "target": target[1],
        "registers": max(map(int, REGISTERS.findall(log))),
        "warpgroup_registers": sorted(map(int, WARPGROUP_REGISTERS.findall(code))),
        "spilled_bytes": sum(map(int, SPILLED.findall(log))),
        "shared_bytes": int(shared[1]) if shared else 0,
        "products": sorted(set(PRODUCT.findall(code))),
        "reads": len(re.findall(rf"{re.escape(READ)}\.\w+\.shared", code)),
        "writes": len(re.findall(rf"{re.escape(READ)}\.\w+\.global", code)),
        "serialized": SERIALIZED in log,
    }
