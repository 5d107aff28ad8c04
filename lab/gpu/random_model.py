"""Random weights of published architectures, made on the device in the layout that the loader would give them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.aot.programs import abstract_target
from jaxspec.checkpoint.load.places import flatten, unflatten
from jaxspec.decode.state import Target
from jaxspec.nn.policy import Policy
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from pallas_kernels.quantized import Quantized

DEVIATION = 0.02
WIDTH = DEVIATION * math.sqrt(3)
ON_DEVICE = 1 << 22
SPREAD = {"fp4": 2.9, "fp8": 107.0, "int8": 74.0}  # deviation of random codes
SMALL = {  # what a tiny model of a family changes in its published config, where the name is there
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "experts_per_token": 2,
    "max_position_embeddings": 512, "sliding_window": 32,
}  # fmt: skip


def published_config(name: str, *, tiny: bool) -> dict[str, Any]:
    """A file of ``configs/models``, or a tiny model of the same kind."""
    root = Path(__file__).resolve().parents[2]
    config = json.loads((root / "configs" / "models" / f"{name}.json").read_text(encoding="utf-8"))
    if not tiny:
        return config
    small = config | {key: value for key, value in SMALL.items() if config.get(key) is not None}
    if "layer_types" in small:
        small["layer_types"] = small["layer_types"][: small["num_hidden_layers"]]
    return small


def random_target(config: Mapping[str, Any], policy: Policy, *, block: int = 128, seed: int = 0) -> Target:
    """A target without meaning: every parameter random, quantized ones as the release is published.

    Args:
      config: published config.
      policy: layout and dtypes.
      block: positions that attention reads at a time.
      seed: of the weights.
    """
    target = abstract_target(config, policy)
    leaves = flatten(target.params["params"])
    for number, (path, leaf) in enumerate(leaves.items()):
        leaves[path] = _fill(path, leaf, seed + number)
    return replace(target, params={"params": unflatten(leaves)}, block=block)


def _fill(path: str, leaf: Any, seed: int) -> Any:
    name = path.rpartition("/")[2]
    if isinstance(leaf, Quantized):
        data, scale = random_quantized(leaf, leaf.format.kind, seed)
        return Quantized(data, scale, leaf.format)
    if name == "norm_D" or "_norm_" in name:
        return jnp.ones(leaf.shape, leaf.dtype)
    return random_array(seed, leaf.shape, leaf.dtype)


def random_quantized(like: Any, kind: str, seed: int) -> tuple[Array, Array]:
    """Numbers and scales of a weight of deviation ``DEVIATION``, from those of an abstract one."""
    exponents = jnp.issubdtype(like.scale.dtype, jnp.integer)
    scale = 127 + round(math.log2(DEVIATION / SPREAD[kind])) if exponents else DEVIATION / SPREAD[kind]
    return random_array(seed, like.data.shape, like.data.dtype), jnp.full(like.scale.shape, scale, like.scale.dtype)


def random_array(seed: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Random entries of any stored dtype: floats are uniform of deviation ``DEVIATION``, whole numbers are any codes.

    Large ones are made on the device, a slice of the first axis at a time, so that making them takes no more memory
    than they do; small ones on the host, where nothing must be compiled for them.
    """
    dtype = jnp.dtype(dtype)
    if math.prod(shape) >= ON_DEVICE:
        return _random(jax.random.key(seed, impl="unsafe_rbg"), tuple(shape), dtype.name)
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(
            rng.integers(0, 1 << 8 * dtype.itemsize, shape, dtype=f"uint{8 * dtype.itemsize}").view(dtype)
        )
    if dtype.itemsize == 1:
        return lax.bitcast_convert_type(jnp.asarray(_numbers(rng.integers(0, 256, shape, dtype=np.uint8), np)), dtype)
    return jnp.asarray(rng.uniform(-WIDTH, WIDTH, shape).astype(dtype))


def random_bits(seed: int, shape: tuple[int, ...]) -> Array:
    """Random bfloat16 as its bits, the way caches keep it."""
    return _bits(random_array(seed, shape, jnp.bfloat16))


_bits = jax.jit(lambda x: lax.bitcast_convert_type(x, jnp.uint16), donate_argnums=0)


def _numbers(bits: Any, xp: Any) -> Any:
    """Bits of fp8 without those of not-a-number."""
    return xp.where(bits & np.uint8(0x7F) == np.uint8(0x7F), bits - np.uint8(1), bits)


def _slice(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1:
        return jax.random.uniform(key, shape, dtype, -WIDTH, WIDTH)
    bits = jax.random.bits(key, shape, f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(bits if jnp.issubdtype(dtype, jnp.integer) else _numbers(bits, jnp), dtype)


def _one_by_one(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    if len(shape) < 3:
        return _slice(key, shape, jnp.dtype(dtype))
    keys = jax.random.split(key, shape[0])
    return lax.map(lambda k: _slice(k, shape[1:], jnp.dtype(dtype)), keys)


_random = jax.jit(_one_by_one, static_argnums=(1, 2))
