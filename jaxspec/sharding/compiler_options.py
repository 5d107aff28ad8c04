"""What XLA's compiler for GPUs is asked for, program by program: the same code in every program, made in seconds."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax

GPU: dict[str, Any] = {
    # It chooses code by its time, so that a layer may round differently in two programs, and has crashed for others.
    "xla_gpu_experimental_enable_fusion_autotuner": False,
    # Triton's analysis of a softmax whose sum is a tree takes half a minute, and its kernel sums the tree many times.
    "xla_disable_hlo_passes": "triton-softmax-rewriter",
}


def compiler_options(platform: str | None = None) -> dict[str, Any] | None:
    """Returns the options of a program, None where there are none.

    Args:
      platform: that it is compiled for, by default the one that this process computes on.
    """
    return GPU if (platform or jax.default_backend()) in ("gpu", "cuda") else None


class LazyJit:
    """A function compiled like by ``jax.jit``, with the options of the platform, which its first call looks up."""

    def __init__(self, function: Callable[..., Any], **how: Any):
        self._function, self._how = function, how

    @cached_property
    def program(self) -> Any:
        """Returns what ``jax.jit`` makes of it."""
        return jax.jit(self._function, compiler_options=compiler_options(), **self._how)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the program, which compiles for new shapes."""
        return self.program(*args, **kwargs)
