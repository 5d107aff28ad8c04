"""The experts that a model chooses for given texts."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.load.model import Model
from jaxspec.models.transformer import Transformer, teacher_forced
from jaxspec.shapes import Array, Params
from jaxspec.sharding.compiler_options import compiler_options

CHUNK = 64


def routed_experts(model: Model, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns expert ids [layers, tokens, A] of each text, by teacher forcing; one program for all texts."""
    longest = -(-max(map(len, texts)) // CHUNK) * CHUNK
    routes = jax.jit(partial(_routes, model.net), compiler_options=compiler_options())
    position = np.arange(longest, dtype=np.int32)[None]
    chosen = []
    for text in texts:
        token = np.zeros((1, longest), np.int32)
        token[0, : len(text)] = text
        chosen.append(np.asarray(routes(model.params, token, position))[:, : len(text)])
    return chosen


def _routes(net: Transformer, params: Params, token_BT: Array, position_BT: Array) -> Array:
    hidden = teacher_forced(net, params, token_BT, position_BT)[1]
    return jnp.stack([routing.expert_MA for routing in hidden.routing])
