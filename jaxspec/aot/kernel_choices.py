"""Which operations of a model's programs kernels compute on a GPU, and why not the others."""

from typing import Any

import jax

from jaxspec.aot import process
from jaxspec.aot.programs import ProgramSettings, programs
from pallas_kernels import blocks
from pallas_kernels.select import recording


def kernel_choices(
    setting: ProgramSettings, names: tuple[str, ...] = (), *, gpu: str = "h100"
) -> dict[str, list[dict[str, Any]]]:
    """Traces programs and returns the choices made in each, each once; nothing is compiled.

    Args:
      setting: model and shapes.
      names: of the programs, all by default.
      gpu: name of a description in ``configs/hardware/targets``; what was measured on such a card counts.

    Returns:
      Entries ``op``, ``case``, ``implementation`` and ``reason``.
    """
    choices_by_program = {}
    for name, program in programs(setting, names).items():
        with recording() as choices, blocks.on_card(process.target_name(gpu)):
            jax.eval_shape(program.call, *program.arguments)
        choices_by_program[name] = [vars(choice) for choice in dict.fromkeys(choices)]
    return choices_by_program
