"""Named cases of adding and normalizing: small ones of every kind, and layers of published models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.add_norm.api import Norm, Parts, add_norm
from pallas_kernels.case import Case

NORM = Norm(1e-6)
COPIED = Norm(1e-6, 0.0, "bfloat16")
PLANES = Norm(1e-5, 0.0, "bfloat16", 2)


@dataclass(frozen=True)
class Sizes:
    """A shape of the operation.

    Attributes:
      rows, width: M and D.
      parts: S, 0 for none.
      bias: whether there is one.
      layers: L of the stacks, 0 for none.
      norm: how rows are normalized.
    """

    rows: int
    width: int
    parts: int = 0
    bias: bool = False
    layers: int = 0
    norm: Norm = NORM


def _abstract(s: Sizes) -> tuple[Any, ...]:
    stack = jax.ShapeDtypeStruct((s.layers, s.width) if s.layers else (s.width,), jnp.bfloat16)
    part = jax.ShapeDtypeStruct((s.parts, s.rows, s.width), jnp.float32) if s.parts else None
    number = jax.ShapeDtypeStruct((), jnp.int32) if s.layers else None
    return jax.ShapeDtypeStruct((s.rows, s.width), jnp.float32), stack, part, stack if s.bias else None, number


def _random(s: Sizes, key: jax.Array) -> tuple[Any, ...]:
    *like, layer = _abstract(s)
    keys = jax.random.split(key, len(like))
    made = [
        None if x is None else jax.random.normal(k, x.shape).astype(x.dtype) for k, x in zip(keys, like, strict=True)
    ]
    return (*made, None if layer is None else jnp.int32(s.layers - 1))


def _call(s: Sizes, implementation: Any) -> Callable[..., Any]:
    def call(x_MD: jax.Array, scale: jax.Array, part_SMD: Any, bias: Any, layer: Any) -> Any:
        parts = None if part_SMD is None else Parts(part_SMD, bias)
        return add_norm(x_MD, scale, s.norm, parts, layer=layer, implementation=implementation)

    return call


def _case(name: str, size: Literal["tiny", "real"], s: Sizes) -> Case:
    # Sums in another order; a number of the copy may then be rounded to its neighbor, 2 ** -8 of it away.
    return Case(
        name, size, partial(_abstract, s), partial(_random, s), partial(_call, s), 4e-3 if s.norm.dtype else 3e-6
    )


CASES: tuple[Case, ...] = (
    _case("alone", "tiny", Sizes(3, 48, norm=Norm(1e-5, offset=1.0))),
    _case("parts_bias_layers_planes", "tiny", Sizes(5, 40, 3, bias=True, layers=2, norm=PLANES)),
    _case("qwen3_30b_a3b_1", "real", Sizes(1, 2048, 8, layers=48, norm=COPIED)),
    _case("qwen3_30b_a3b_256", "real", Sizes(256, 2048, 8, layers=48, norm=COPIED)),
    _case("gpt_oss_120b_4", "real", Sizes(4, 2880, 5, bias=True, layers=36, norm=PLANES)),
    _case("deepseek_v3_16", "real", Sizes(16, 7168, 2, layers=58)),
    _case("deepseek_v3_alone", "real", Sizes(1, 7168)),
)
