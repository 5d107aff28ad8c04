"""Early exit: the target's own first layers, with its norm and head, as a draft model."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.errors import ConfigError
from jaxspec.models.arch import segments
from jaxspec.models.depth import stack_of
from jaxspec.models.transformer import Transformer
from jaxspec.shapes import Params


def first_layers(net: Transformer, params: Params, layers: int) -> tuple[Transformer, Params]:
    """Returns the network that exits a model after some of its layers (Elhoushi 2024, 2404.16710), with its arrays.

    Stacked layers are copied: the length of a stack is part of its program.

    Args:
      net: the model's network.
      params: its parameters.
      layers: how many layers it keeps.

    Raises:
      ConfigError: there are fewer layers, or none would be left out.
    """
    every = net.arch.layers
    if not 1 <= layers < len(every):
        raise ConfigError(
            f"speculative_config: exit_layer must be from 1 to {len(every) - 1}, for the target has {len(every)} "
            f"layers; got {layers}"
        )
    arch = replace(net.arch, layers=every[:layers], mtp=())
    own: Any = params["params"]
    if net.policy.layout.depth == "unrolled":
        left_out = {f"layers_{y}" for y in range(layers, len(every))}
        return Transformer(arch, net.policy), {"params": {k: v for k, v in own.items() if k not in left_out}}
    before, after = tuple(segments(every)), tuple(segments(arch.layers))
    first = {k: v for k, v in own.items() if not k.startswith("segment_")}
    sources: dict[str, list[tuple[str, int]]] = {}
    for y in range(layers):
        sources.setdefault(stack_of(y, after)[0], []).append(stack_of(y, before)[:2])
    for name, stacked in sources.items():
        parts = (jax.tree.map(lambda x, i=i: x[i], own[stack]) for stack, i in stacked)
        first[name] = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    return Transformer(arch, net.policy), {"params": first}
