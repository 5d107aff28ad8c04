"""Keys and values as float8_e4m3fn, with one float32 scale per position and head.

A scale depends on nothing but its own vector, so what is stored of a token has the same bits in every chunk, row and
draft. It is float32: its 4 bytes are few beside a head's channels, and a bfloat16 one would add an error of its own.
"""

from dataclasses import replace

import jax.numpy as jnp

from jaxspec.cache.addressing import FLOAT8, StreamSpec
from jaxspec.shapes import Array

LARGEST = float(jnp.finfo(FLOAT8).max)  # 448
LEAST_SCALE = 1e-30


def float8_streams(keys: StreamSpec, values: StreamSpec) -> dict[str, StreamSpec]:
    """Returns the streams of keys and values, and of their scales, which lie beside them."""
    streams = {"k": replace(keys, dtype=FLOAT8), "v": replace(values, dtype=FLOAT8)}
    return streams | {f"{name}_scale": replace(spec, width=1, dtype="float32") for name, spec in streams.items()}


def quantize(x: Array) -> tuple[Array, Array]:
    """Computes ``x / scale`` in float8_e4m3fn and the scale of each vector [..., 1], ``max |x| / 448`` in float32."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / LARGEST, LEAST_SCALE)
    return (x / scale).astype(FLOAT8), scale


def dequantize(x: Array, scale: Array) -> Array:
    """Computes the product in float32."""
    return x.astype(jnp.float32) * scale
