"""Random parameters as networks draw them, without compiling what draws them: that takes a second for each network."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.nn.param import INITS, NORMAL, ONES, ZEROS, declared
from jaxspec.shapes import Params


def random_params(net: Any, seed: int, wide: float = 1.0) -> Params:
    """Parameters of a network with ``initial``, see ``fill``."""
    return fill(jax.eval_shape(net.initial, jax.random.key(0)), seed, wide)


def fill(abstract: Any, seed: int, wide: float = 1.0) -> Any:
    """Parameters of these shapes by their initializers' law, times ``wide`` where they have more than one axis.

    Tables of experts name the first ones, in any order.
    """
    rng = np.random.default_rng(seed)

    def drawn(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        param = declared(path)
        if param.kind == "table" and param.init is None:
            return rng.permuted(np.tile(np.arange(leaf.shape[-1]), (*leaf.shape[:-1], 1)), axis=-1)
        scale, init = wide if len(leaf.shape) > 1 else 1.0, param.init or INITS.get(param.kind, NORMAL)
        if init is NORMAL:
            return 0.02 * scale * rng.normal(size=leaf.shape)
        if init in (ONES, ZEROS):
            return np.full(leaf.shape, scale * (init is ONES))
        return scale * np.asarray(init(jax.random.key(seed), leaf.shape, leaf.dtype))

    shapes = nn.unbox(abstract)
    return jax.tree_util.tree_map_with_path(lambda path, x: jnp.asarray(drawn(path, x).astype(x.dtype)), shapes)
