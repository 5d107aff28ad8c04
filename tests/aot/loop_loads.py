"""What a kernel's loop does with what it loads into registers, read from its PTX."""

import os
import re
from pathlib import Path

from jaxspec.aot import process
from jaxspec.aot.kernel_cases import compile_cases


def read(op: str, case: str, kernel: str) -> dict[str, int]:
    """Compiles a case; to be called through ``process.run``.

    Returns:
      Registers that the loop with the kernel's products ``loaded``, and how many of them this turn ``used``: the others
      are copied for the next one, so that nothing waits for memory.
    """
    (report,) = compile_cases(op, names=[case]).values()
    assert report["error"] is None, report["error"]
    texts = [file.read_text() for file in (Path(os.environ[process.DUMP]) / "dump").glob("*.ptx")]
    (text,) = [text for text in texts if f".entry {kernel}(" in text]
    blocks = re.split(r"^\$L\w+:.*$", text, flags=re.MULTILINE)
    lines = max(blocks, key=lambda block: block.count("mma.sync")).split("bra ")[0].splitlines()
    loads = [line for line in lines if "ld.global" in line]
    loaded = {
        register for line in loads for register in re.findall(r"%r\d+", line.rpartition("ld.global")[2].split("[")[0])
    }
    others = [line for line in lines if line not in loads and not re.match(r"\s*mov\.b32", line)]
    used = loaded & {register for line in others for register in re.findall(r"%r\d+", line)}
    return {"loaded": len(loaded), "used": len(used)}
