"""Which operations of a model's programs kernels compute on a GPU, and why not the others."""

from typing import Any

import jax

from jaxspec.aot.programs import ProgramSettings, programs
from pallas_kernels.select import recording


def kernel_choices(setting: ProgramSettings, wanted: tuple[str, ...] = ()) -> dict[str, list[dict[str, Any]]]:
    """Choices by program, each once, as they are made while it is traced; nothing is compiled.

    Args:
      setting: model and shapes.
      wanted: names of programs, all by default.

    Returns:
      Entries ``op``, ``case``, ``implementation`` and ``reason``.
    """
    found = {}
    for name, program in programs(setting, wanted).items():
        with recording() as choices:
            jax.eval_shape(program.call, *program.arguments)
        found[name] = [vars(choice) for choice in dict.fromkeys(choices)]
    return found
