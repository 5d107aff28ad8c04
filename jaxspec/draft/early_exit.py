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
    """The network that leaves a model behind some of its layers (Elhoushi 2024, 2404.16710), with the same arrays.

    Where layers lie stacked, the first ones of each stack are copied, for a stack's length is part of its program.

    Args:
      net: the model's network.
      params: its parameters.
      layers: how many layers it keeps.

    Raises:
      ConfigError: there are not as many layers, or nothing would be left out.
    """
    whole = net.arch
    if not 1 <= layers < len(whole.layers):
        raise ConfigError(
            f"speculative_config: exit_layer must be from 1 to {len(whole.layers) - 1}, for the target has "
            f"{len(whole.layers)} layers; got {layers}"
        )
    arch = replace(whole, layers=whole.layers[:layers], mtp=())
    own: Any = params["params"]
    if net.policy.layout.depth == "unrolled":
        behind = {f"layers_{y}" for y in range(layers, len(whole.layers))}
        return Transformer(arch, net.policy), {"params": {k: v for k, v in own.items() if k not in behind}}
    before, after = tuple(segments(whole.layers)), tuple(segments(arch.layers))
    kept = {k: v for k, v in own.items() if not k.startswith("segment_")}
    places: dict[str, list[tuple[str, int]]] = {}
    for y in range(layers):
        places.setdefault(stack_of(y, after)[0], []).append(stack_of(y, before)[:2])
    for name, sources in places.items():
        kept[name] = jax.tree.map(lambda *x: jnp.stack(x), *(_layer(own[stack], place) for stack, place in sources))
    return Transformer(arch, net.policy), {"params": kept}


def _layer(stack: Any, place: int) -> Any:
    return jax.tree.map(lambda x: x[place], stack)
