"""Named cases of routing: small ones of every scoring, and the routers of published models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.route.api import Routed, Scoring, route


@dataclass(frozen=True)
class Sizes:
    """A shape of the operation.

    Attributes:
      rows, experts: M and E.
      scoring: how.
      parts: S.
      biases: which there are.
      layers: L of their stacks, 0 for none.
      height: rows per block, 0 to sort nothing.
      live: whether some rows are left out.
    """

    rows: int
    experts: int
    scoring: Scoring
    parts: int = 2
    biases: tuple[str, ...] = ()
    layers: int = 0
    height: int = 16
    live: bool = False


def _abstract(s: Sizes) -> tuple[Any, ...]:
    shape = (s.parts, s.rows * (3 if s.scoring.thirds else 1), s.experts)
    stack = (s.layers, s.experts) if s.layers else (s.experts,)
    biases = {name: jax.ShapeDtypeStruct(stack, jnp.float32) for name in s.biases}
    layer = jax.ShapeDtypeStruct((), jnp.int32) if s.layers else None
    live = jax.ShapeDtypeStruct((s.rows,), jnp.int32) if s.live else None
    return jax.ShapeDtypeStruct(shape, jnp.float32), biases, layer, live


def _random(s: Sizes, key: jax.Array) -> tuple[Any, ...]:
    part, biases, layer, live = _abstract(s)
    keys = jax.random.split(key, 1 + len(biases))
    made = {name: jax.random.normal(k, biases[name].shape) for name, k in zip(biases, keys[1:], strict=True)}
    # Sixteenths: sums of some of them are exact in any order, and now and then two experts are equally good.
    logits = jnp.round(16 * jax.random.normal(keys[0], part.shape)) / 16
    made = {name: jnp.round(16 * x) / 16 for name, x in made.items()}
    rows = None if live is None else (jnp.arange(s.rows, dtype=jnp.int32) % 3 != 1).astype(jnp.int32)
    return logits, made, None if layer is None else jnp.int32(s.layers - 1), rows


def _call(s: Sizes, implementation: Any) -> Callable[..., Any]:
    def call(part_SXE: jax.Array, biases: Any, layer: Any, live_M: Any) -> Any:
        run = partial(route, height=s.height or None, implementation=implementation)
        return described(run(part_SXE, biases, s.scoring, layer=layer, live_M=live_M))

    return call


def described(routed: Routed) -> Any:
    """Replaces what is undefined after the last row and in blocks that are not in use."""
    if routed.sorted is None:
        return routed
    order_R, blocks = routed.sorted
    used_N = blocks.count_N > 0
    group_N, first_N = (jnp.where(used_N, x, 0) for x in (blocks.group_N, blocks.first_N))
    order_R = jnp.where(jnp.arange(len(order_R)) < jnp.sum(blocks.count_N), order_R, 0)
    return replace(routed, sorted=(order_R, replace(blocks, group_N=group_N, first_N=first_N)))


def _case(name: str, size: Literal["tiny", "real"], s: Sizes) -> Case:
    # Choices and places are whole numbers of under 2 ** 18, so that none may differ; exponentials differ by 2e-7.
    return Case(name, size, partial(_abstract, s), partial(_random, s), partial(_call, s), 2e-6)


SOFTMAX, SIGMOID = Scoring("softmax", 3), Scoring("sigmoid", 3, floor=1e-20, scale=2.5)
GROUPS = replace(SIGMOID, groups=4, kept_groups=2)
DEEPSEEK = Scoring("sigmoid", 8, floor=1e-20, scale=2.5, groups=8, kept_groups=4, thirds=True)

CASES: tuple[Case, ...] = (
    _case("softmax", "tiny", Sizes(5, 12, SOFTMAX, layers=2, biases=("logit",), live=True)),
    _case("one_row", "tiny", Sizes(1, 12, SOFTMAX, parts=1)),
    _case("unsorted", "tiny", Sizes(21, 12, SOFTMAX, height=0)),
    _case("groups", "tiny", Sizes(9, 16, GROUPS, biases=("choice",), layers=3)),
    _case("thirds", "tiny", Sizes(6, 12, replace(SIGMOID, renormalize=False, thirds=True), height=2)),
    _case("many_rows", "tiny", Sizes(40, 260, SOFTMAX)),
    *(_case(f"qwen3_30b_a3b_{m}", "real", Sizes(m, 128, Scoring("softmax", 8), 4, live=True)) for m in (1, 4, 64, 256)),
    _case("gpt_oss_120b_16", "real", Sizes(16, 128, Scoring("softmax", 4), 5, ("logit",), 36)),
    _case("mixtral_8x7b_8", "real", Sizes(8, 8, Scoring("softmax", 2), 8)),
    *(_case(f"deepseek_v3_{m}", "real", Sizes(m, 256, DEEPSEEK, 14, ("choice",), 58)) for m in (1, 16)),
)
