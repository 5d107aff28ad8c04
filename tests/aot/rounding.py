"""What the code of recurrences does with floats, read from what ptxas is given."""

import re
from itertools import product

from jaxspec.aot import process
from jaxspec.aot.program_report import compile_for
from jaxspec.sharding.targets import target_devices
from pallas_kernels.recurrent_steps.cases import published

# Sums and products of floats, and what moves the parts of a sum between threads.
STEP = re.compile(r"\b(?:(?:add|sub|mul|fma|mad)\.[\w.]*f32\w*|shfl\.[\w.]+|(?:ld|st)\.shared[\w.]*)\s[^;]*;")
REGISTER = re.compile(r"%\w+")


def float_steps(name: str, rows: list[int], counts: list[int]) -> dict[str, list[str]]:
    """Compiles a published layer for an H100.

    Returns:
      By case its steps in their order, without the names of registers.
    """
    devices, steps = target_devices(process.target_text("h100")), {}
    for case in (published(name, B, T) for B, T in product(rows, counts)):
        program = f"rounding_{case.name}"
        compile_for(case.call("triton"), case.abstract(), devices, name=program)
        code = process.dump_file(program, "1.ptx")
        assert ".entry recurrent_steps" in code
        steps[case.name] = [REGISTER.sub("%", step) for step in STEP.findall(code)]
    return steps
