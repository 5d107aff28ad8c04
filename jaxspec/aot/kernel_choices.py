"""Which operations of a model's programs kernels compute on a GPU, and why not the others."""

from typing import Any

import jax

from jaxspec.aot.programs import ProgramSettings, programs
from pallas_kernels.select import recording


def kernel_choices(setting: ProgramSettings, names: tuple[str, ...] = ()) -> dict[str, list[dict[str, Any]]]:
    """Traces programs and returns the choices made in each, each once; nothing is compiled.

    Args:
      setting: model and shapes.
      names: of the programs, all by default.

    Returns:
      Entries ``op``, ``case``, ``implementation`` and ``reason``.
    """
    choices_by_program = {}
    for name, program in programs(setting, names).items():
        with recording() as choices:
            jax.eval_shape(program.call, *program.arguments)
        choices_by_program[name] = [vars(choice) for choice in dict.fromkeys(choices)]
    return choices_by_program
